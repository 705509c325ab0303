"""S2: an HTTP server that answers as llama-server does, or as badly as a test wants.

A `Script` says what each path answers. A stream is a list of steps: bytes are sent as they are, a number is
a pause in seconds, `CUT` drops the connection, `FREEZE` stays silent until the test ends.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = "cut"
FREEZE = "freeze"
RESET = "reset"
Step = bytes | float | str

TIMINGS = {
    "cache_n": 0,
    "prompt_n": 10,
    "prompt_ms": 100.0,
    "predicted_n": 11,
    "predicted_ms": 200.0,
    "draft_n": 8,
    "draft_n_accepted": 6,
}


def event(row: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n\n"


def delta(**values: Any) -> dict[str, Any]:
    """A chat chunk."""
    finish = values.pop("finish", None)
    return {"choices": [{"index": 0, "delta": values, "finish_reason": finish}], "model": "fake"}


def chat_steps(text: str = "Hello", timings: dict[str, Any] | None = TIMINGS) -> list[Step]:
    """A chat answer in good order, a letter a chunk."""
    last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": len(text)}}
    if timings is not None:
        last["timings"] = timings
    return [
        event(delta(role="assistant", content=None)),
        *(event(delta(content=letter)) for letter in text),
        event(delta(finish="stop")),
        event(last),
        event(b"[DONE]"),
    ]


def completion_steps(
    text: str = "Hi", timings: dict[str, Any] | None = TIMINGS, tokens: Sequence[int] = (1, 2)
) -> list[Step]:
    """A completion in good order: it has no [DONE]."""
    last: dict[str, Any] = {"content": "", "stop": True, "stop_type": "limit", "id_slot": 0, "tokens": []}
    if timings is not None:
        last["timings"] = timings
    return [event({"content": text, "tokens": list(tokens), "stop": False, "id_slot": 0}), event(last)]


@dataclass
class Script:
    """What the server answers. `health` statuses are used up one by one, the last one stays."""

    health: list[int] = field(default_factory=lambda: [200])
    aliases: list[str] = field(default_factory=lambda: ["fake"])
    slots: list[dict[str, Any]] | None = field(
        default_factory=lambda: [{"id": 0, "speculative": True, "is_processing": False}]
    )
    metrics: Callable[[], str] | None = None
    chat: Callable[[dict[str, Any]], Sequence[Step]] = lambda body: chat_steps()
    completion: Callable[[dict[str, Any]], Sequence[Step]] = lambda body: completion_steps()
    refuse: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    json: dict[str, Any] = field(default_factory=dict)
    on_generate: Callable[[int], None] = lambda count: None


class FakeServer:
    """A running one: `url`, and the `requests` it saw as (method, path, body, headers)."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.generated = 0
        self.over = threading.Event()
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()

    def posts(self, path: str) -> list[Any]:
        """The bodies that were posted to a path."""
        return [body for method, where, body, _ in self.requests if method == "POST" and where == path]


@contextmanager
def fake_server(script: Script | None = None) -> Iterator[FakeServer]:
    """A fake server for the length of a block."""
    server = FakeServer(script or Script())
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        raw = self.rfile.read(length)
        self._answer("POST", json.loads(raw) if raw else None)

    def _answer(self, method: str, body: Any) -> None:
        server = self.server_of
        server.requests.append((method, self.path, body, dict(self.headers)))
        script = server.script
        if self.path in script.refuse:
            status, raw = script.refuse[self.path]
            self._send(status, raw)
        elif self.path == "/health":
            status = script.health.pop(0) if len(script.health) > 1 else script.health[0]
            self._health(status)
        elif self.path == "/v1/chat/completions":
            self._generate(script.chat(body))
        elif self.path == "/completion":
            self._generate(script.completion(body))
        else:
            self._plain(script)

    def _health(self, status: int) -> None:
        if status == 200:
            self._send_json(200, {"status": "ok"})
        else:
            error = {"message": "Loading model", "type": "unavailable_error", "code": status}
            self._send_json(status, {"error": error})

    def _plain(self, script: Script) -> None:
        if self.path in script.json:
            self._send_json(200, script.json[self.path])
        elif self.path == "/v1/models":
            self._send_json(200, {"data": [{"id": script.aliases[0], "aliases": script.aliases}]})
        elif self.path == "/slots" and script.slots is not None:
            self._send_json(200, script.slots)
        elif self.path == "/metrics" and script.metrics is not None:
            self._send(200, script.metrics().encode())
        elif self.path in ("/slots", "/metrics"):
            self._send_json(501, {"error": {"code": 501, "message": "off", "type": "not_supported_error"}})
        else:
            self._send_json(
                404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
            )

    def _generate(self, steps: Sequence[Step]) -> None:
        server = self.server_of
        server.generated += 1
        server.script.on_generate(server.generated)
        if steps and isinstance(steps[0], tuple):
            self._send(*steps[0])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for step in steps:
                if not self._step(step):
                    return
            self._chunk(b"")
        except OSError:
            pass  # the client left

    def _step(self, step: Step) -> bool:
        if isinstance(step, bytes):
            self._chunk(step)
            return True
        if step == FREEZE:
            self.server_of.over.wait(60)
        elif step == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif step != CUT:
            time.sleep(float(step))
            return True
        self.close_connection = True
        self.connection.close()
        return False

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def metrics(drafted: int = 0, accepted: int = 0, steps: int = 0, predicted: int = 0) -> str:
    """Prometheus text with the drafting counters."""
    return "\n".join(
        [
            "# HELP llamacpp:tokens_predicted_total Number of generation tokens processed",
            "# TYPE llamacpp:tokens_predicted_total counter",
            f"llamacpp:tokens_predicted_total {predicted}",
            f"llamacpp:spec_decode_num_draft_tokens_total {drafted}",
            f"llamacpp:spec_decode_num_accepted_tokens_total {accepted}",
            f"llamacpp:spec_decode_num_drafts_total {steps}",
            f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}',
        ]
    )
