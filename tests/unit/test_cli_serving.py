"""serve, chat, status, logs, stop, pull, pairs and use on the command line, with a fake llama-server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflashcpp.conversion import convert
from dflashcpp.server.process import Identity
from tests.support import checkpoints
from tests.support import fake_llama_server as fake
from tests.support.fake_http import CUT, Script, chat_steps, delta, event, fake_server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("a pair")
    target = checkpoints.write_target(folder / "target.gguf")
    source = checkpoints.write_checkpoint(folder / "v1", checkpoints.t1())
    return target, convert(source, target=target, type="F16", output=folder / "draft.gguf").file


class Cli:
    """Runs `dflashcpp` as a process of its own, with a cache and a config of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.environment = {
            **os.environ,
            "DFLASHCPP_CACHE": str(tmp_path / "a cache"),
            "DFLASHCPP_CONFIG": str(tmp_path / "config.toml"),
        }

    def __call__(self, *words: Any, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dflashcpp", *map(str, words)],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def start(self, *words: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dflashcpp", *map(str, words)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def cli(tmp_path: Path) -> Any:
    made = Cli(tmp_path)
    yield made
    made("stop", "--all", code=0)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return fake.make(tmp_path / "a build", starts=str(tmp_path / "starts"))


def test_a_dry_run_prints_the_exact_command_and_starts_nothing(
    cli: Cli, program: Path, pair: tuple[Path, Path]
) -> None:
    words = [
        "serve",
        "--build",
        program,
        "-m",
        pair[0],
        "-md",
        pair[1],
        "--port",
        "0",
        "-mg",
        "0",
        "--",
        "--new",
    ]
    done = cli("serve", "--dry-run", "--json", *words[1:])
    data = json.loads(done.stdout)
    assert data["spec_type"] == "draft-dflash"
    assert data["argv"][0] == str(program)
    assert data["argv"][-1] == "--new"
    assert data["argv"][data["argv"].index("-mg") + 1] == "0"
    assert fake.starts(cli.folder / "starts") == []
    assert "--parallel 1" in done.stderr


def test_a_dry_run_of_a_pair_says_what_would_be_fetched_and_converted(cli: Cli, program: Path) -> None:
    done = cli("serve", "muse-glimmer-30b", "--spec-draft-n-max", "40", "--build", program, "--dry-run")
    assert "# first: fetch the target: Hugging Face unsloth/Muse-Glimmer-30B-GGUF" in done.stdout
    assert "# first: convert the drafter to Q4_K_M" in done.stdout
    assert "--spec-draft-n-max 15" in done.stdout
    assert "40 is more than the drafter was trained for" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--ctx-sise", "1"], 2, "did you mean --ctx-size"),
        (["-hf", "a/b"], 2, "no TLS"),
        (["-h"], 0, "Serve a target"),
        (["-m", "missing.gguf"], 1, "there is no such file"),
        (["no-such-pair"], 1, "known pairs: smollm2-135m"),
        (["smollm2-135m", "muse-glimmer-30b"], 2, "one pair at most"),
        (["smollm2-135m", "-m", "x.gguf"], 2, "not both"),
    ],
)
def test_wrong_words_are_a_sentence(cli: Cli, program: Path, words: list[str], code: int, text: str) -> None:
    done = cli("serve", "--build", program, *words, code=code)
    assert text in done.stdout + done.stderr


def test_a_missing_build_is_a_sentence(cli: Cli) -> None:
    assert "is missing" in cli("serve", "--build", cli.folder / "none", code=1).stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_serve_tells_one_object_when_ready_and_ends_its_child_on_a_signal(
    cli: Cli, program: Path, pair: tuple[Path, Path], name: str
) -> None:
    process = cli.start("serve", "--build", program, "-m", pair[0], "-md", pair[1], "--port", "0", "--json")
    assert process.stdout is not None
    data = json.loads(process.stdout.readline())
    assert data["spec_type"] == "draft-dflash"
    assert data["proof"]["drafted"] == 8
    child = Identity.of(data["pid"])
    assert child is not None
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert not child.alive()
    assert "Traceback" not in errors


def test_serve_killed_outright_leaves_no_orphan(cli: Cli, program: Path, pair: tuple[Path, Path]) -> None:
    process = cli.start("serve", "--build", program, "-m", pair[0], "--port", "0", "--json")
    assert process.stdout is not None
    child = Identity.of(json.loads(process.stdout.readline())["pid"])
    assert child is not None
    process.kill()
    process.communicate()
    until = time.monotonic() + 10
    while child.alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.alive()
    assert "ended" in cli("status").stdout


def test_serve_reports_a_server_that_dies_and_fails(
    cli: Cli, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    program = fake.make(
        tmp_path / "dying",
        log=["ggml_aligned_malloc: insufficient memory (attempted to allocate 7 MB)"],
        then="exit 1",
    )
    done = cli("serve", "--build", program, "-m", pair[0], "--port", "0", "--json", code=1)
    assert "has no 7 MB left" in json.loads(done.stdout)["error"]


def test_detach_status_chat_logs_stop(cli: Cli, program: Path, pair: tuple[Path, Path]) -> None:
    words = ["serve", "--build", program, "-m", pair[0], "-md", pair[1], "--port", "0", "--detach", "--json"]
    data = json.loads(cli(*words).stdout)
    child = Identity.of(data["pid"])
    assert child is not None
    status = json.loads(cli("status", "--json").stdout)["servers"]
    assert [(row["url"], row["state"]) for row in status] == [(data["url"], "ready")]
    done = cli("chat", "Hi")
    assert done.stdout == "Hello\n"
    assert "mean accepted length n/a" in done.stderr
    assert cli("logs", "-n", "0").stdout == ""
    assert data["url"] in cli("stop", "--dry-run").stdout
    assert child.alive()
    cli("stop")
    assert not child.alive()
    assert "no server of ours runs" in cli("status").stdout
    assert "no server of ours runs" in cli("chat", "Hi", code=1).stderr


def test_detach_tells_why_a_server_did_not_come_up(cli: Cli, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    program = fake.make(tmp_path / "dying", log=["error: invalid argument: --metrics"], then="exit 1")
    done = cli("serve", "--build", program, "-m", pair[0], "--port", "0", "--detach", code=1)
    assert "does not know --metrics" in done.stderr


def test_chat_json_is_one_object_and_a_cut_answer_fails_without_statistics(cli: Cli) -> None:
    with fake_server(Script(chat=lambda body: chat_steps("Hello"))) as server:
        data = json.loads(cli("chat", "Hi", "--url", server.url, "--json", "--temp", "0").stdout)
        assert (data["text"], data["timings"]["drafted"], data["mean_accepted_length"]) == ("Hello", 8, None)
        assert server.posts("/v1/chat/completions")[0]["temperature"] == 0
        assert cli("chat", "Explain:", "--url", server.url, stdin="a text").stdout == "Hello\n"
        assert server.posts("/v1/chat/completions")[1]["messages"][-1]["content"] == "Explain:\n\na text"
    with fake_server(Script(chat=lambda body: [event(delta(content="ab")), CUT])) as server:
        done = cli("chat", "Hi", "--url", server.url, code=1)
        assert done.stdout.startswith("ab")
        assert "cut the answer off" in done.stderr
        assert "tok/s" not in done.stderr


def test_chat_without_a_question_or_a_server_is_a_sentence(cli: Cli) -> None:
    assert "there is no question" in cli("chat", "--url", "http://127.0.0.1:1", code=2).stderr
    assert "nothing listens" in cli("chat", "Hi", "--url", "http://127.0.0.1:1", code=1).stderr


def test_use_decides_which_pair_is_served(cli: Cli, program: Path) -> None:
    assert cli("use").stdout == "smollm2-135m\n"
    cli("use", "qwen3.8-27b")
    assert cli("use").stdout == "qwen3.8-27b\n"
    assert "qwen3.8-27b *" in cli("pairs").stdout
    assert "Qwen3.8-27B" in cli("serve", "--dry-run", "--build", program).stdout
    assert "no pair named" in cli("use", "nothing", code=1).stderr


def test_pull_dry_run_names_sources_and_sizes(cli: Cli) -> None:
    done = cli("pull", "muse-glimmer-30b", "--dry-run")
    assert (
        "target: Hugging Face unsloth/Muse-Glimmer-30B-GGUF (Muse-Glimmer-30B-UD-Q2_K_XL.gguf), 11868 MiB"
        in done.stdout
    )
    assert json.loads(cli("pairs", "--json").stdout)["pairs"][1]["name"] == "muse-glimmer-30b"


def test_interrupting_a_start_in_the_background_leaves_nothing_behind(
    cli: Cli, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    program = fake.make(tmp_path / "slow", health=[503] * 10000, starts=str(tmp_path / "starts"))
    process = cli.start("serve", "--build", program, "-m", pair[0], "--port", "0", "--detach")
    servers = tmp_path / "a cache" / "state" / "servers"
    until = time.monotonic() + 20
    while not list(servers.glob("*/server.json")) and time.monotonic() < until:
        time.sleep(0.05)
    child = Identity(**json.loads(next(servers.glob("*/server.json")).read_text())["process"])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    until = time.monotonic() + 15
    while Identity.of(child.pid) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert Identity.of(child.pid) is None
    assert "no server of ours runs" in cli("status").stdout
