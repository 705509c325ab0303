"""Headers over HTTP: a few requests, no more bytes than needed, and a sentence for each way it can fail."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, ValueType, read_header
from dflashcpp.gguf_file.parse import parse
from dflashcpp.gguf_file.remote import RemoteSource


class Server(http.server.ThreadingHTTPServer):
    """Serves one body; what it does with ranges is set by the test."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = b""
        self.mode = "range"
        self.status = 200
        self.redirect: str | None = None
        self.failures = 0
        self.seen: list[dict[str, str]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        server.seen.append({"path": self.path, **dict(self.headers.items())})
        if server.redirect:
            self.answer(302, {"Location": server.redirect}, b"")
        elif server.status != 200:
            self.answer(server.status, {}, b"no")
        elif server.failures:
            server.failures -= 1
            self.close_connection = True
        elif server.mode == "range":
            self.ranged()
        else:
            self.whole()

    def ranged(self) -> None:
        body = self.server.body
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match
        begin, end = int(match[1]), min(int(match[2]) + 1, len(body))
        if begin >= len(body):
            self.answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        else:
            self.answer(206, {"Content-Range": f"bytes {begin}-{end - 1}/{len(body)}"}, body[begin:end])

    def whole(self) -> None:
        self.send_response(200)
        if self.server.mode == "whole":
            self.send_header("Content-Length", str(len(self.server.body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        with contextlib.suppress(OSError):
            for at in range(0, len(self.server.body), 1 << 16):
                self.wfile.write(self.server.body[at : at + (1 << 16)])
                self.server.sent += 1 << 16

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def running() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dflashcpp.gguf_file.remote.time.sleep", lambda _: None)
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A header of 3 MiB before 40 MiB of data."""
    path = tmp_path_factory.mktemp("remote") / "m.gguf"
    with GgufWriter(path) as out:
        out.add(
            "tokenizer.ggml.tokens", Kv.array(ValueType.STRING, [f"token {i:020}" for i in range(90_000)])
        )
        out.declare("a", (10 << 20,), TensorType.F32)
        out.begin()
        out.write("a", 0, bytes(40 << 20))
        out.commit()
    return path


def test_only_the_header_is_fetched_and_it_is_the_same(server: Server, model: Path) -> None:
    server.body = model.read_bytes()
    with RemoteSource(f"{server.url}/m.gguf") as source:
        remote = parse(source)
        fetched = source.fetched
    local = read_header(model)
    assert (remote.kv, remote.tensors, remote.data_start, remote.size) == (
        local.kv,
        local.tensors,
        local.data_start,
        local.size,
    )
    assert fetched <= 2 * local.data_start
    assert server.sent <= 2 * local.data_start
    assert len(server.seen) <= 5


@pytest.mark.parametrize("mode", ["whole", "whole, unknown length"])
def test_a_server_that_ignores_ranges_is_not_read_to_the_end(server: Server, model: Path, mode: str) -> None:
    server.body, server.mode = model.read_bytes(), mode
    header = read_header(f"{server.url}/m.gguf")
    assert header.tensors == read_header(model).tensors
    assert len(server.seen) == 1
    assert server.sent < len(server.body) / 2


@pytest.mark.parametrize("mode", ["range", "whole", "whole, unknown length"])
def test_a_small_file_and_a_cut_off_one(server: Server, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "s.gguf"
    with GgufWriter(path) as out:
        out.add("general.architecture", Kv.string("dflash"))
        out.begin()
        out.commit()
    server.mode, server.body = mode, path.read_bytes()
    assert read_header(f"{server.url}/s.gguf").architecture == "dflash"
    server.body = server.body[:-3]
    with pytest.raises(DflashError, match=r"cut off|stopped after"):
        read_header(f"{server.url}/s.gguf")
    server.body = b""
    with pytest.raises(DflashError, match=r"empty|stopped after"):
        read_header(f"{server.url}/s.gguf")


def test_a_hub_page_address_becomes_a_download_and_the_token_stays_with_the_hub(
    server: Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running() as storage:
        storage.body = model.read_bytes()
        server.redirect = storage.url.replace("127.0.0.1", "localhost") + "/blob-storage"
        read_header(f"{server.url}/org/repo/blob/main/m.gguf")
    assert server.seen[0]["path"] == "/org/repo/resolve/main/m.gguf"
    assert server.seen[0]["Authorization"] == "Bearer hf_secret"
    assert storage.seen
    assert all("Authorization" not in request for request in storage.seen)


def test_the_token_does_not_go_to_other_hosts(
    server: Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.body = model.read_bytes()
    read_header(f"{server.url}/m.gguf", token="hf_other")
    assert all("Authorization" not in request for request in server.seen)


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "HF_TOKEN"), (403, "gated"), (404, None), (500, "network")]
)
def test_each_refusal_has_its_sentence(server: Server, status: int, hint: str | None) -> None:
    server.status = status
    with pytest.raises(DflashError, match=f"the server answered {status}") as caught:
        read_header(f"{server.url}/m.gguf")
    assert hint is None or hint in (caught.value.hint or "")
    assert len(server.seen) == (3 if status == 500 else 1)


def test_a_lost_connection_is_tried_again(server: Server, model: Path) -> None:
    server.body, server.failures = model.read_bytes(), 2
    assert read_header(f"{server.url}/m.gguf").tensors


def test_no_server_at_all_is_one_sentence(server: Server) -> None:
    with running() as gone:
        url = gone.url
    with pytest.raises(DflashError, match="connection refused"):
        read_header(f"{url}/m.gguf")
    with pytest.raises(DflashError, match="no usable address"):
        read_header("http://[bad/m.gguf")


def test_offline_means_no_request_to_the_hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DflashError, match="HF_HUB_OFFLINE"):
        read_header(f"{server.url}/org/repo/resolve/main/m.gguf")
    assert server.seen == []


def test_a_file_that_changes_between_two_requests_is_noticed(server: Server, model: Path) -> None:
    server.body = model.read_bytes()
    with RemoteSource(f"{server.url}/m.gguf") as source:
        server.body += b"more"
        with pytest.raises(DflashError, match="changed on the server"):
            source.upto(1 << 20)
