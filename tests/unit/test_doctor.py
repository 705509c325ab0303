from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import doctor, llamacpp, paths
from dflashcpp.client import Client
from dflashcpp.server.process import Identity, write_pidfile
from dflashcpp.stats import Timings
from tests.support.fake_http import TIMINGS, Script, chat_steps, completion_steps, fake_server
from tests.support.fake_tools import nvcc, nvidia_smi

pytestmark = pytest.mark.usefixtures("own_cache")


def machine(name: str, **options: Any) -> doctor.Check:
    return next(check for check in doctor.machine(**options) if check.name == name)


def served(script: Script) -> dict[str, doctor.Check]:
    with fake_server(script) as server:
        return {check.name: check for check in doctor.server(Client(server.url, retries=0))}


PROPS = {"/props": {"model_path": "/m.gguf", "build_info": "b0"}}


# -- the machine -----------------------------------------------------------------------------------


def test_a_machine_without_a_build_is_told_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "find_build", lambda: None)
    found = machine("llama.cpp")
    assert (found.state, found.fix) == ("warn", "dflashcpp build")


def test_a_missing_compiler_is_a_failure_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    found = machine("compiler")
    assert found.state == "fail"
    assert found.fix
    assert machine("git").state == "fail"


def test_an_nvcc_too_old_for_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc(tmp_path, "11.8", (80, 86))
    nvidia_smi(tmp_path, "NVIDIA B200, 10.0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("dflashcpp.llamacpp.gpu_tools.CUDA_ROOTS", tmp_path / "none")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = machine("cuda")
    assert found.state == "fail"
    assert found.fix


def test_a_full_disk_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_BUILD_GIB", 1e9)
    found = machine("disk")
    assert (found.state, "DFLASHCPP_CACHE" in found.fix) == ("fail", True)


def test_a_port_in_use_is_told_with_its_holder() -> None:
    with fake_server() as other:
        found = machine("port", port=other.port)
        assert found.state == "warn"
        assert f"port {other.port} on 127.0.0.1 is taken" in found.text


def test_variables_that_llama_server_reads_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    assert "LLAMA_ARG_CTX_SIZE" in machine("environment").text


def test_a_server_nobody_looks_after_and_one_that_ended_are_found() -> None:
    folder = paths.state_dir("servers", "5")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = Identity.of(child.pid)
        assert identity is not None
        gone = {"pid": child.pid, "started": "ticks 1", "exe": "/x"}
        write_pidfile(folder / "server.json", identity, port=5, url="http://127.0.0.1:5", supervisor=gone)
        found = machine("servers")
        assert (found.state, "nobody looks after http://127.0.0.1:5" in found.text) == ("warn", True)
    finally:
        child.kill()
        child.wait()
    assert "ended without being stopped" in machine("servers").text


def test_a_check_that_raises_is_a_failed_check_not_the_end_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflashcpp.server.registry.noted", _raise)
    found = {check.name: check for check in doctor.machine()}
    assert found["servers"].state == "fail"
    assert found["environment"].state in ("ok", "warn")


def _raise(*_: Any) -> Any:
    from dflashcpp.errors import DflashError

    raise DflashError("no", hint="do")


# -- a server --------------------------------------------------------------------------------------


def test_a_good_server_passes_every_check() -> None:
    found = served(Script(json=PROPS, chat=lambda body: chat_steps('{"n": 3}')))
    assert {check.state for check in found.values()} == {"ok"}
    assert "mean accepted length n/a" in found["drafting"].text
    assert list(found) == ["answers", "drafting", "two requests", "warm prefix", "json schema"]


def test_a_server_that_is_not_there_is_one_failure_and_no_more() -> None:
    found = {check.name: check for check in doctor.server(Client("http://127.0.0.1:1", retries=0))}
    assert [(name, check.state) for name, check in found.items()] == [("answers", "fail")]


def test_router_mode_is_no_server() -> None:
    assert served(Script(json={"/props": {"model_path": ""}}))["answers"].state == "fail"


def test_drafts_that_are_never_accepted_point_at_conversion_and_cache() -> None:
    found = served(Script(json=PROPS, chat=lambda body: chat_steps("x", {**TIMINGS, "draft_n_accepted": 0})))[
        "drafting"
    ]
    assert found.state == "fail"
    assert "dflashcpp verify" in found.fix


def test_a_drafter_that_drafts_nothing_fails_and_none_at_all_is_skipped() -> None:
    bare = {key: value for key, value in TIMINGS.items() if not key.startswith("draft")}
    for speculative, state in ((True, "fail"), (False, "skip")):
        script = Script(
            json=PROPS, slots=[{"speculative": speculative}], chat=lambda body: chat_steps("x", bare)
        )
        assert served(script)["drafting"].state == state


def test_a_drafter_that_rests_because_drafting_does_not_pay_is_no_failure() -> None:
    bare = {key: value for key, value in TIMINGS.items() if not key.startswith("draft")}
    resting = {**bare, "draft_n": 0, "draft_n_accepted": 0, "draft_n_steps_per_len": [23]}
    script = Script(json=PROPS, slots=[{"speculative": True}], chat=lambda body: chat_steps("x", resting))
    found = served(script)["drafting"]
    assert found.state == "skip" and "rests" in found.text


def test_a_second_request_that_breaks_the_server_is_found() -> None:
    count = {"n": 0}

    def chat(body: dict[str, Any]) -> list[Any]:
        count["n"] += 1
        return ["cut"] if count["n"] == 3 else chat_steps("x")

    found = served(Script(json=PROPS, chat=chat))["two requests"]
    assert found.state == "fail"


def test_structured_output_that_is_refused_or_ignored_is_found() -> None:
    assert served(Script(json=PROPS, chat=lambda body: chat_steps("hello")))["json schema"].state == "fail"
    refusal = json.dumps({"error": {"code": 400, "message": "no grammar here"}}).encode()

    def chat(body: dict[str, Any]) -> list[Any]:
        return [(400, refusal)] if "response_format" in body else chat_steps("x")

    found = served(Script(json=PROPS, chat=chat))["json schema"]
    assert (found.state, "no grammar here" in found.text) == ("fail", True)


def test_an_answer_that_changes_with_a_warm_prefix_is_told() -> None:
    texts = iter(["a", "b", "c", "d", "e", "f", "g"])
    assert (
        served(Script(json=PROPS, chat=lambda body: chat_steps(next(texts))))["warm prefix"].state == "warn"
    )


def test_a_greedy_text_the_drafter_changes_fails() -> None:
    plain = Script(
        json={
            "/apply-template": {"prompt": "p"},
            "/tokenize": {"tokens": [0]},
            "/detokenize": {"content": "w"},
        },
        completion=lambda body: completion_steps("x", tokens=[1, 2]),
    )
    with fake_server(plain) as server:
        client = Client(server.url)
        same = doctor.greedy_answer(client)
        assert doctor.greedy_agreement(client, same).state == "ok"
        resting = replace(same, timings=Timings(1, 1.0, 2, 1.0, drafted=0))
        assert doctor.greedy_agreement(client, resting).state == "warn"


def test_the_command_fails_when_a_check_fails(own_cache: Path) -> None:
    command = [sys.executable, "-m", "dflashcpp", "doctor", "--json", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DFLASHCPP_CACHE": str(own_cache)},
    )
    data = json.loads(done.stdout)
    assert (done.returncode, data["pass"]) == (1, False)
    assert "answers" in data["failed"]
