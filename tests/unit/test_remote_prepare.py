"""What `serve --ssh` finds out and makes ready before it starts anything, behind S3, the fake ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflashcpp import pairs
from dflashcpp.errors import DflashError
from dflashcpp.remote import building, command, engine, files, models, server, serving
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.host import Host
from dflashcpp.remote.models import Store
from dflashcpp.server.flags import FlagTable, Given
from dflashcpp.server.launch import compose, read_api_key
from tests.support import fake_llama_server
from tests.support.fake_ssh import FakeSsh
from tests.support.stand_in import StandIn


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    made = FakeSsh(tmp_path / "fake bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return made


@pytest.fixture
def far(fake: FakeSsh) -> Iterator[Host]:
    yield Host(Ssh("far"))


def program(folder: Path, name: str, text: str) -> Path:
    """A shell program that the far side finds in ~/.local/bin."""
    path = folder / ".local/bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


HELP = "-m,    --model FNAME                    model path to load\n-c,    --ctx-size N     size\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "busybox"])
def test_any_login_shell_over_there_will_do(shell: str) -> None:
    """The words ssh hands to a login shell, run by that shell."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    started = [path, "sh", "-c"] if shell == "busybox" else [path, "-c"]
    nasty = ["it's", 'a "quote"', "$HOME `id`", "*", "\\", "~"]
    words = command.data_argv(Ssh("far"), "for word; do printf '%s\\n' \"$word\"; done", nasty)[-1]
    done = subprocess.run([*started, words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == nasty
    script = command.script_argv(Ssh("far"))[-1]
    text = command.script_text("printf '%s\\n' \"$@\"", nasty, "mark")
    # stdin stays open until the answer has ended, as ours does: its end ends what runs over there
    with subprocess.Popen(
        [*started, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(text)
        process.stdin.flush()
        said = [process.stdout.readline().rstrip("\n") for _ in range(len(nasty) + 2)]
    assert said == ["mark begin", *nasty, "mark end 0"]


def test_the_dflashcpp_over_there_builds_the_server(far: Host, fake: FakeSsh) -> None:
    server = program(fake.home, "our-server", f"cat <<'END'\n{HELP}END")
    answer = json.dumps({"llama_server": str(server), "base": "0c1e570"})
    program(fake.home, "dflashcpp", f'echo compiling >&2\necho "$@" >"$HOME/asked"\necho \'{answer}\'')
    found = engine.find(far, far.facts())
    assert (found.binary, found.base) == (str(server), "0c1e570") and found.table.has("--ctx-size")
    assert (fake.home / "asked").read_text() == "build --backend cpu --json\n"


def test_a_build_that_fails_over_there_says_why(far: Host, fake: FakeSsh) -> None:
    program(fake.home, "dflashcpp", 'echo \'{"error": "no compiler", "hint": "apt install g++"}\'; exit 1')
    with pytest.raises(DflashError, match="no compiler") as caught:
        engine.find(far, far.facts())
    assert caught.value.hint == "apt install g++"


def test_a_named_server_must_be_there_and_be_one(far: Host, fake: FakeSsh) -> None:
    with pytest.raises(DflashError, match=r"far has no .*/none"):
        engine.find(far, far.facts(), named="~/none")
    program(fake.home, "other", "echo hello")
    with pytest.raises(DflashError, match="--help fails"):
        engine.find(far, far.facts(), named="~/.local/bin/other")


def test_without_dflashcpp_our_patched_source_is_built_there_once(
    far: Host, fake: FakeSsh, built_stand_in: StandIn
) -> None:
    facts = far.facts()
    binary, base = building.ensure(far, facts)
    assert base == "abc1234" and str(fake.home) in binary
    told = subprocess.run([binary, "--version"], capture_output=True, text=True)
    assert "abc1234-p" in told.stdout + told.stderr, "the patched version shows"
    stamp = Path(binary).stat().st_mtime_ns
    assert building.ensure(far, facts, may_build=False) == (binary, base)
    assert Path(binary).stat().st_mtime_ns == stamp
    left = [path.name for path in Path(binary).parents[2].iterdir()]
    assert left == [Path(binary).parents[1].name], "no archive and no work folder stays"


def test_a_far_side_without_a_compiler_is_told_before_anything_is_sent(
    far: Host, fake: FakeSsh, built_stand_in: StandIn
) -> None:
    facts = far.facts()
    bare = type(facts)(**{**vars(facts), "tools": {"make": "/usr/bin/make"}})
    with pytest.raises(DflashError, match=r"cmake, g\+\+ missing"):
        building.ensure(far, bare)
    with pytest.raises(DflashError, match="no llama-server yet"):
        building.ensure(far, facts, may_build=False)
    assert not [call for call in fake.calls() if "dd of=" in call[-1]]


def test_a_pair_is_pulled_by_the_dflashcpp_over_there(far: Host, fake: FakeSsh) -> None:
    (fake.home / "t.gguf").write_bytes(b"target")
    (fake.home / "d.gguf").write_bytes(b"drafter")
    answer = json.dumps({"target": str(fake.home / "t.gguf"), "drafter": str(fake.home / "d.gguf")})
    program(fake.home, "dflashcpp", f'echo "$@" >"$HOME/asked"\necho \'{answer}\'')
    target, draft = models.of_pair(Store(far, far.facts()), pairs.load_pair(), None, with_draft=True)
    assert draft is not None and (target.size, draft.size) == (6, 7)
    assert (fake.home / "asked").read_text() == "pull smollm2-135m --draft-type Q8_0 --json\n"


def test_a_pair_that_is_nowhere_says_how_to_get_it_there(far: Host) -> None:
    with pytest.raises(DflashError, match="far has no") as caught:
        models.of_pair(Store(far, far.facts()), pairs.load_pair(), None, with_draft=True)
    assert "--push" in (caught.value.hint or "")


def test_an_unfinished_download_of_the_target_is_found_out(far: Host, fake: FakeSsh) -> None:
    known = pairs.load_pair()
    (fake.home / "models").mkdir()
    (fake.home / "models" / known.target.file).write_bytes(b"half")
    with pytest.raises(DflashError, match="has 4 bytes"):
        models.of_pair(Store(far, far.facts()), known, None, with_draft=False)


def test_a_named_file_is_pushed_only_when_asked(far: Host, fake: FakeSsh, tmp_path: Path) -> None:
    local = tmp_path / "my drafter.gguf"
    local.write_bytes(b"x" * 1000)
    pushed = Store(far, far.facts(), "~/my models", push=True).named(str(local), "-md")
    assert (
        pushed.path == str(fake.home / "my models" / local.name) and Path(pushed.path).stat().st_size == 1000
    )
    found = Store(far, far.facts(), "~/my models").named(local.name, "-md")
    assert found == pushed
    with pytest.raises(DflashError, match="far has no"):
        Store(far, far.facts()).named("nothing.gguf", "-m")


def test_an_api_key_goes_over_unseen_and_readable_for_the_user_alone(far: Host, fake: FakeSsh) -> None:
    place = fake.home / "state" / "9001.key"
    files.write_small(far, str(place), b"hunter2\n", serving._WRITE_SECRET)
    assert place.read_bytes() == b"hunter2\n" and place.stat().st_mode & 0o077 == 0
    assert "hunter2" not in json.dumps(fake.calls())
    with pytest.raises(DflashError, match="cannot be written"):
        files.write_small(far, str(fake.home), b"x", serving._WRITE_SECRET)


def test_an_api_key_is_over_there_from_start_to_stop_and_no_longer(
    far: Host, fake: FakeSsh, tmp_path: Path
) -> None:
    key = tmp_path / "a key"
    key.write_text("hunter2\n")
    key.chmod(0o600)
    table = FlagTable.parse(fake_llama_server.HELP)
    given = [Given("--api-key-file", str(key)), Given("--port", "9002")]
    facts = far.facts()
    composed = compose(table, Path("/b/llama-server"), given, model=Path("/m.gguf"), draft=None)
    launch = serving._with_key(facts, composed)
    there = fake.home / ".local/state/dflashcpp/remote/9002.key"
    assert str(there) in launch.argv and str(key) not in launch.argv
    assert not there.exists()  # a dry run goes no further
    serving.send_key(far, facts, launch)
    assert there.read_text() == "hunter2\n" and there.stat().st_mode & 0o077 == 0
    server.start(far, 9002, [str(program(fake.home, "sleeps", "exec sleep 4721.25"))], {"work": []})
    server.stop(far, 9002, 1)
    assert not there.exists()
    assert "hunter2" not in json.dumps(fake.calls())


def test_a_dry_run_fetches_nothing_and_says_so(
    far: Host, fake: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program(fake.home, "dflashcpp", f"echo \"$@\" >>'{tmp_path}/calls'; exit 1")
    (tmp_path / "target.gguf").write_bytes(b"x")
    store = Store(far, far.facts(), push=True, dry_run=True)
    with pytest.raises(DflashError) as named:
        store.named("target.gguf", "-m")
    with pytest.raises(DflashError) as pair:
        models.of_pair(store, pairs.load_pair(), None, with_draft=True)
    for caught in (named, pair):
        assert "dry run" in str(caught.value.hint)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("text", [None, "", "# only a remark\n"])
def test_a_key_file_that_is_missing_or_empty_is_a_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    with pytest.raises(DflashError, match="key"):
        read_api_key(tmp_path / "key")


def test_nothing_of_a_build_is_left_when_we_are_ended(far: Host, fake: FakeSsh) -> None:
    """The leash: our end goes, and the program over there is ended."""
    import threading
    import time

    program(fake.home, "dflashcpp", "exec sleep 4720.25")
    stop = threading.Event()
    words = [str(fake.home / ".local/bin/dflashcpp"), "build"]
    runner = threading.Thread(target=_swallow, args=(far, words, stop))
    runner.start()

    def there() -> bool:
        return any(
            "4720.25" in " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])
        )

    until = time.monotonic() + 20
    while not there() and time.monotonic() < until:
        time.sleep(0.05)
    assert there()
    stop.set()
    runner.join()
    until = time.monotonic() + 20
    while there() and time.monotonic() < until:
        time.sleep(0.05)
    assert not there()


def _swallow(far: Host, words: list[str], stop: object) -> None:
    with pytest.raises(DflashError):
        far.run("command", *words, timeout=None, stop=stop)  # type: ignore[arg-type]
