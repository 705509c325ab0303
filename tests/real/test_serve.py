"""The real pair on the real llama-server: start, proof, statistics, equal texts, failures, orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashcpp import Client, DflashError, LlamaServer, demo, pairs
from dflashcpp.agreement import compare
from dflashcpp.client import ClientError
from dflashcpp.llamacpp import Build
from dflashcpp.progress import SILENT
from dflashcpp.server import supervise
from dflashcpp.server.flags import read_flags
from dflashcpp.server.process import Identity

pytestmark = [pytest.mark.real, pytest.mark.slow]
PROMPTS = Path(__file__).parents[2] / "models" / "smollm2-135m-dflash2" / "held-out-prompts.json"
SMALL = {"threads": 1, "ctx_size": 1024}


@pytest.fixture(scope="module")
def files() -> tuple[Path, Path]:
    pair = pairs.load_pair()
    target = pairs.ensure_target(pair)
    return target, pairs.ensure_drafter(pair, target=target)


@pytest.fixture(scope="module")
def drafting(files: tuple[Path, Path], build_patched: Build) -> Iterator[LlamaServer]:
    # not adaptive: how much is drafted then depends on the machine
    with LlamaServer(
        *files, build=build_patched, spec_draft_n_max=4, spec_draft_adaptive=False, **SMALL
    ) as server:
        yield server


@pytest.fixture(scope="module")
def plain(files: tuple[Path, Path], build_patched: Build) -> Iterator[LlamaServer]:
    with LlamaServer(files[0], build=build_patched, **SMALL) as server:
        yield server


def test_every_flag_we_set_ourselves_is_known_to_the_build(build_patched: Build) -> None:
    table = read_flags(build_patched.binary("llama-server"))
    assert len(table.flags) > 200
    names = (
        "--model --model-draft --spec-type --spec-draft-n-max --parallel --metrics --verbosity --flash-attn"
    )
    for name in [*names.split(), "--host", "--port", "--alias", "--api-key-file", "-ngld", "-ctkd"]:
        assert table.has(name), name
    assert "draft-dflash" in table.spec_types()
    assert not table.has("--draft-max")


def test_drafting_is_proved_and_memory_is_told(drafting: LlamaServer) -> None:
    assert drafting.proof is not None
    assert (drafting.proof.attached, drafting.proof.drafted > 0) == (True, True)
    assert drafting.memory is not None
    for context in ("target", "draft"):
        for kind in ("weights", "kv", "compute"):
            assert drafting.memory.mib(context, kind) > 0, (context, kind)


def test_statistics_of_a_coding_answer_are_whole(drafting: LlamaServer) -> None:
    timings = drafting.client().chat(demo.QUESTIONS[0][1], temperature=0, max_tokens=96).timings
    assert timings is not None
    assert timings.drafted is not None
    assert timings.accepted is not None
    assert timings.verify_steps is not None
    assert 0 < timings.accepted < timings.drafted <= 4 * timings.verify_steps
    assert timings.mean_accepted_length is not None
    assert timings.mean_accepted_length > 1.5
    # every generated token is the first, an accepted one, or the one each step adds
    assert timings.verify_steps == sum(timings.steps_of_length[1:])
    assert timings.predicted_n <= 1 + timings.accepted + sum(timings.steps_of_length)


def test_a_baseline_really_has_no_drafter(plain: LlamaServer) -> None:
    client = plain.client()
    assert client.speculative() is False
    timings = client.chat("Hi", max_tokens=8).timings
    assert timings is not None
    assert timings.drafted is None
    assert plain.memory is not None
    assert plain.memory.mib("draft") == 0


def test_greedy_texts_with_and_without_the_drafter_agree(drafting: LlamaServer, plain: LlamaServer) -> None:
    prompts = [(kind, text) for kind, text in json.loads(PROMPTS.read_text())][::11]
    assert len(prompts) >= 5
    client = plain.client()
    for kind, text in prompts:
        with_drafter = demo._ask(drafting.client(), kind, text, SILENT)
        without = demo._ask(client, kind, text, SILENT)
        found = compare(client, without.prompt, without.tokens, with_drafter.tokens)
        assert found.agrees, f"{text}: {found.text()}"


def test_structured_output_works_with_the_drafter_on(drafting: LlamaServer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = drafting.client().chat(
        "Give me a number as JSON.", temperature=0, max_tokens=48, response_format=form
    )
    assert isinstance(json.loads(answer.text)["n"], int)


def test_a_second_shorter_request_and_a_warm_prefix_are_answered(drafting: LlamaServer) -> None:
    client = drafting.client()
    long = client.complete("one two three " * 40, n_predict=8, temperature=0)
    short = client.complete("one two", n_predict=8, temperature=0)
    again = client.complete("one two three " * 40, n_predict=8, temperature=0)
    assert long.text == again.text
    assert short.timings is not None


def test_cancelling_frees_the_slot(drafting: LlamaServer) -> None:
    stream = drafting.client().chat("Write a very long story.", True, max_tokens=900, temperature=0)
    for number, _ in enumerate(stream):
        if number == 5:
            assert stream.cancel() is True
    slots = drafting.client().slots()
    assert slots is not None
    assert not any(slot["is_processing"] for slot in slots)


def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words(drafting: LlamaServer) -> None:
    with pytest.raises(ClientError, match="exceeds the available context size"):
        drafting.client().chat("word " * 3000)


def test_an_api_key_is_asked_for_and_given_without_being_shown(
    files: tuple[Path, Path], build_patched: Build, tmp_path: Path
) -> None:
    key = tmp_path / "a key"
    key.write_text("s3cret\n")
    key.chmod(0o600)
    with LlamaServer(files[0], build=build_patched, api_key_file=str(key), **SMALL) as server:
        assert server.client().chat("Hi", max_tokens=2).timings is not None
        with pytest.raises(ClientError) as caught:
            Client(server.url).chat("Hi")
        assert caught.value.status == 401
        assert "s3cret" not in " ".join(server.argv) + server.log.read_text()


def test_a_server_killed_in_mid_stream_cuts_the_answer_without_statistics(
    files: tuple[Path, Path], build_patched: Build
) -> None:
    with LlamaServer(files[0], build=build_patched, **SMALL) as server:
        stream = server.client().chat("Write a long story.", True, max_tokens=800, temperature=0)
        with pytest.raises(ClientError) as caught:
            for number, _ in enumerate(stream):
                if number == 3:
                    os.kill(server.pid, signal.SIGKILL)
        assert caught.value.kind == "cut"
        assert caught.value.partial is not None
        assert caught.value.partial.timings is None
        failure = None
        for _ in range(50):
            failure = server.failure("while serving")
            if failure:
                break
            time.sleep(0.05)
        assert failure is not None
        assert "SIGKILL" in failure.message


def test_a_frozen_server_is_told_as_silence_and_still_ended(
    files: tuple[Path, Path], build_patched: Build
) -> None:
    with LlamaServer(files[0], build=build_patched, **SMALL) as server:
        stream = server.client(idle_timeout=1.0).chat("Write a long story.", True, max_tokens=800)
        with pytest.raises(ClientError, match="fell silent for 1 s"):
            for number, _ in enumerate(stream):
                if number == 3:
                    os.kill(server.pid, signal.SIGSTOP)
    assert server.returncode is not None


def test_a_server_that_is_killed_is_started_again(files: tuple[Path, Path], build_patched: Build) -> None:
    server = LlamaServer(*files, build=build_patched, spec_draft_n_max=2, **SMALL)
    server.supervisor = Identity.of_this()
    said: list[str] = []
    with server:
        first = server.pid
        watching = threading.Thread(target=lambda: _until_over(server, said), name="watch", daemon=True)
        watching.start()
        os.kill(first, signal.SIGKILL)
        for _ in range(600):
            if any("up again" in line for line in said):
                break
            time.sleep(0.1)
        assert "up again" in said[-1], said
        assert server.pid != first
        assert server.client().chat("Hi", max_tokens=4).text


def _until_over(server: LlamaServer, said: list[str]) -> None:
    try:
        supervise.watch(server, restart=True, say=said.append, first_wait=0.1)
    except DflashError as error:
        said.append(error.message)


def test_a_corrupted_drafter_is_found_before_or_at_the_start(
    files: tuple[Path, Path], build_patched: Build, tmp_path: Path
) -> None:
    raw = files[1].read_bytes()
    cut, bent = tmp_path / "cut.gguf", tmp_path / "bent.gguf"
    cut.write_bytes(raw[: len(raw) // 2])
    bent.write_bytes(raw.replace(b"selector_hidden.weight", b"selector_hidden.waight"))
    for bad in (cut, bent):
        with pytest.raises(DflashError) as caught, LlamaServer(files[0], bad, build=build_patched, **SMALL):
            pass
        assert caught.value.message
        assert "Traceback" not in caught.value.message


def test_a_context_that_no_machine_holds_is_explained(files: tuple[Path, Path], build_patched: Build) -> None:
    server = LlamaServer(files[0], build=build_patched, threads=1, ctx_size=10_000_000)
    assert server.shortage()
    with pytest.raises(DflashError, match=r"machine has no .* MB left|memory"):
        server.start()
    assert server.returncode is not None


def test_the_commands_work_on_the_real_pair(build_patched: Build) -> None:
    command = [sys.executable, "-m", "dflashcpp"]
    serve = subprocess.Popen(
        [
            *command,
            "serve",
            "--build",
            str(build_patched.binary("llama-server")),
            "-t",
            "1",
            "--port",
            "0",
            "--no-spec-draft-adaptive",  # how much is drafted then depends on the machine
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stdout is not None
        data = json.loads(serve.stdout.readline())
        chat = subprocess.run(
            [
                *command,
                "chat",
                demo.QUESTIONS[0][1],
                "--url",
                data["url"],
                "--json",
                "--temp",
                "0",
                "-n",
                "64",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        answer = json.loads(chat.stdout)
        assert answer["mean_accepted_length"] > 1
        assert "mean accepted length" in chat.stderr
        child = Identity.of(data["pid"])
        assert child is not None
    finally:
        serve.kill()
        serve.communicate()
    for _ in range(100):
        if not child.alive():
            break
        time.sleep(0.05)
    assert not child.alive()


def test_the_demo_ends_well(build_patched: Build) -> None:
    result = demo.run(build=build_patched, threads=1)
    assert result.problems == ()
    assert {one.kind for one in result.asked} == {"code", "prose"}
    assert all(one.agreement.agrees for one in result.asked)
    assert all((one.drafted.mean_accepted_length or 0) > 1 for one in result.asked)
    assert result.memory["draft"]["weights"] > 0
