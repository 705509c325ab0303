"""A real llama-server that runs out of memory: in which phase, and what is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import folder
from dflashcpp.llamacpp import Build
from dflashcpp.memory.account import out_of_memory
from dflashcpp.server import LlamaServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

MIB = 2**20


@pytest.fixture(scope="module")
def drafter(target_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = folder("models") / "smollm2-135m-dflash2" / "model.safetensors"
    return convert(
        source, target=target_gguf, type="Q8_0", output=tmp_path_factory.mktemp("d") / "d.gguf"
    ).file


def _refused(build: Build, target: Path, drafter: Path, *extra: str) -> DflashError:
    with pytest.raises(DflashError) as caught:
        LlamaServer(target, drafter, build=build, parallel=1, threads=1, extra=extra).start()
    return caught.value


def test_a_target_that_fills_the_device_leaves_no_room_for_the_drafter(
    build_patched: Build,
    target_gguf: Path,
    drafter: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFLASHCPP_DEVICE_MEMORY", "Host=210")
    error = _refused(build_patched, target_gguf, drafter, "-c", "4096", "--fit", "off")
    found = re.search(r"the drafter needs (\d+) MiB on Host, (\d+) MiB are free", error.message)
    assert found is not None, error.message
    assert int(found[1]) > int(found[2])
    assert "it ran out at: load" in str(error.hint)
    assert "the drafter does not" in str(error.hint)


def test_caches_that_do_not_fit_are_told_from_weights(
    build_patched: Build, target_gguf: Path, drafter: Path, own_cache: Path
) -> None:
    error = _refused(build_patched, target_gguf, drafter, "-c", "20000000", "--fit", "off")
    assert re.search(r"the machine has no [0-9.]+ MB left|the memory is not enough", error.message)
    assert "the caches do not fit: lower -c" in str(error.hint)


@contextmanager
def _started(build: Build, target: Path, drafter: Path, log: Path) -> Iterator[tuple[int, str]]:
    """A server without warm-up, nothing asked yet: its process id and address."""
    command = [str(build.binary("llama-server")), "-m", str(target), "-md", str(drafter)]
    command += ["--spec-type", "draft-dflash", "-c", "1024", "-np", "1", "-t", "1", "-lv", "4"]
    command += ["--no-warmup", "--no-repack", "--fit", "off", "--port", "0"]
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "GGML_NO_BACKTRACE": "1"}
        ) as child,
    ):
        try:
            until = time.monotonic() + 120
            address = None
            while address is None and time.monotonic() < until:
                time.sleep(0.05)
                address = re.search(r"listening on (http://\S+)", log.read_text())
            assert address is not None, log.read_text()[-2000:]
            yield child.pid, address[1]
        finally:
            child.kill()


def test_the_first_request_of_the_pristine_engine_can_run_out_after_a_good_start(
    build_pristine: Build, target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    with _started(build_pristine, target_gguf, drafter, log) as (pid, url):
        process = psutil.Process(pid)
        limit = process.memory_info().vms + 12 * MIB  # less than reading layers adds
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        body = json.dumps({"prompt": "hello world " * 40, "n_predict": 4}).encode()
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(f"{url}/completion", body, timeout=60).read()
    found = out_of_memory(log.read_text().splitlines())
    assert found is not None and found.phase == "first token"
    assert "-ub" in found.advice
