"""A small HTTP server that stands for llama-server at the far end of a tunnel."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
MODELS = {"object": "list", "data": [{"id": "tiny", "aliases": ["tiny"], "owned_by": "llamacpp"}]}


class FarServer:
    """`state`: ready, loading, silent, other (a web server), half (healthy, but no llama-server)."""

    def __init__(self, state: str = "ready", port: int = 0) -> None:
        self.state = state
        self.served = 0
        far = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                far.served += 1
                with contextlib.suppress(ConnectionError):  # the client may have gone
                    far.answer(self)

            def log_message(self, *arguments: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One answer in the present state."""
        while self.state == "silent":
            time.sleep(0.05)
        status, body = 200, {"status": "ok"}
        if self.state == "loading":
            status, body = 503, LOADING
        elif self.state == "other":
            status, body = 404, {}
        elif request.path == "/v1/models":
            body = MODELS if self.state == "ready" else {"data": [{"id": "x", "owned_by": "vllm"}]}
        raw = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        request.wfile.write(raw)

    def close(self) -> None:
        """Stop listening."""
        self.state = "ready" if self.state == "silent" else self.state
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def far_server(state: str = "ready") -> Iterator[FarServer]:
    """A FarServer for a `with` block."""
    server = FarServer(state)
    try:
        yield server
    finally:
        server.close()
