"""A Hugging Face Hub on this machine: enough of its API for downloads, and the faults it can have."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


@dataclass
class FakeHub:
    """Repositories by name, each a mapping of file names to bytes; `faults` by repository.

    Faults: `gated`, `missing`, `private`, `unauthorised`, `broken` (500), `cut` (every body breaks
    off half-way), `cut once`. `requests` records method, path and Range of every request.
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: int = 0  # bytes of bodies
    tokens: set[str] = field(default_factory=set)  # Authorization headers that came

    def add(self, repo: str, folder: Path) -> None:
        """Publish the files of a folder."""
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.repos[repo] = found


_FAULTS: dict[str, tuple[int, dict[str, str]]] = {
    "gated": (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}),
    "missing": (404, {"X-Error-Code": "RepoNotFound"}),
    "unauthorised": (
        401,
        {"X-Error-Code": "", "X-Error-Message": "Invalid credentials in Authorization header"},
    ),
    "forbidden": (403, {}),
    "broken": (500, {}),
}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - a class with its state around it
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Range")))
            if self.headers.get("Authorization"):
                hub.tokens.add(self.headers["Authorization"])
            path = self.path.split("?")[0]
            match = _API.fullmatch(path) or _FILE.fullmatch(path)
            repo = match[1] if match else ""
            fault = hub.faults.get(repo) or ("" if repo in hub.repos else "missing")
            if fault in _FAULTS:
                status, headers = _FAULTS[fault]
                return self._send(status, b'{"error": "fault"}', headers, body)
            if _API.fullmatch(path):
                siblings = [{"rfilename": name} for name in hub.repos[repo]]
                answer = json.dumps(
                    {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
                )
                return self._send(200, answer.encode(), {"Content-Type": "application/json"}, body)
            return self._file(hub.repos[repo].get(_FILE.fullmatch(path)[2]), fault, repo, body)  # type: ignore[index]

        def _file(self, data: bytes | None, fault: str, repo: str, body: bool) -> None:
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if span is None:
                return self._send(200, data, headers, body, fault, repo)
            begin, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            return self._send(206, data[begin : end + 1], headers, body, fault, repo)

        def _send(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str],
            body: bool,
            fault: str = "",
            repo: str = "",
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            cut = fault.startswith("cut") and len(data) > 100_000
            if cut and fault == "cut once":
                hub.faults.pop(repo, None)
            part = data[: len(data) // 2] if cut else data
            self.wfile.write(part)
            hub.sent += len(part)
            if cut:
                self.wfile.flush()
                self.close_connection = True

    return Handler


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A running hub; its `url` goes into HF_ENDPOINT."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
