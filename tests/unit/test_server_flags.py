from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.server.flags import FlagTable, Given, from_options, read_flags
from tests.support import fake_llama_server as fake

NEW = FlagTable.parse(fake.HELP)


def test_every_name_of_a_flag_finds_the_same_flag_with_its_value() -> None:
    flag = NEW.find("-md")
    assert flag is NEW.find("--model-draft") is NEW.find("--spec-draft-model")
    assert flag is not None
    assert (flag.value, flag.long) == ("FNAME", "--spec-draft-model")


def test_switches_and_values_are_told_apart_also_where_the_text_stands_on_the_next_line() -> None:
    switches = {name for flag in NEW.flags if flag.value is None for name in flag.names}
    assert {"--metrics", "--context-shift", "--no-context-shift", "--slots", "-v"} <= switches
    split = NEW.find("-sm")
    assert split is not None
    assert split.value == "{none,layer,row,tensor}"
    assert "how to split" in split.text


def test_spec_types_are_read_from_the_help() -> None:
    assert "draft-dflash" in NEW.spec_types()
    assert "draft-dflash" not in FlagTable.parse(fake.OLD_HELP).spec_types()


def test_split_keeps_order_values_and_words() -> None:
    parsed = NEW.split(["muse", "-md", "d.gguf", "--metrics", "-c=4096", "-mg", "0", "--", "--new-flag", "1"])
    assert parsed.words == ("muse",)
    assert parsed.flags == (
        Given("-md", "d.gguf"),
        Given("--metrics"),
        Given("-c", "4096"),
        Given("-mg", "0"),
    )
    assert parsed.verbatim == ("--new-flag", "1")


def test_a_value_may_open_with_a_dash_but_a_known_flag_is_never_a_value() -> None:
    assert NEW.split(["-t", "-1"]).flags == (Given("-t", "-1"),)
    with pytest.raises(UsageError, match="-c needs a value"):
        NEW.split(["-c", "-md", "x"])


def test_an_optional_value_may_be_left_out() -> None:
    assert NEW.split(["-fa", "-c", "1"]).flags == (Given("-fa"), Given("-c", "1"))
    assert NEW.split(["-fa", "on"]).flags == (Given("-fa", "on"),)


def test_a_flag_with_two_values_takes_both() -> None:
    parsed = NEW.split(["--control-vector-layer-range", "1", "9", "pair"])
    assert parsed.flags[0].argv() == ["--control-vector-layer-range", "1", "9"]
    assert parsed.words == ("pair",)


@pytest.mark.parametrize("flag", ["--spec-draft-nmax", "--ctx-sise", "--cache-type-kdraft"])
def test_an_unknown_flag_is_refused_with_the_near_match(flag: str) -> None:
    with pytest.raises(UsageError, match="does not know") as caught:
        NEW.split([flag, "4"])
    assert "did you mean --" in str(caught.value.hint)
    assert "after --" in str(caught.value.hint)


def test_a_removed_flag_names_what_replaced_it() -> None:
    with pytest.raises(UsageError, match="--draft-max was removed") as caught:
        NEW.split(["--draft-max", "4"])
    assert "--spec-draft-n-max" in str(caught.value.hint)
    assert "env:" not in str(caught.value.hint)


def test_each_build_has_its_own_flags() -> None:
    old, fork = FlagTable.parse(fake.OLD_HELP), FlagTable.parse(fake.FORK_HELP)
    assert old.has("--draft-max")
    assert not NEW.has("--draft-max")
    assert fork.has("--spec-dflash-max")
    assert not fork.has("--metrics")
    assert not fork.has("--spec-draft-n-max")


def test_a_switch_takes_no_value() -> None:
    for words in (["--metrics=1"], ["--slots", "yes", "-c", "1"], ["--no-slots", "OFF"], ["--slots", "0"]):
        with pytest.raises(UsageError, match="takes no value"):
            NEW.split(words)
    with pytest.raises(UsageError, match="'yes' was given") as caught:
        NEW.split(["--slots", "yes"])
    assert caught.value.hint == "--no-slots turns it off"
    assert NEW.split(["--slots", "small-pair"]).words == ("small-pair",)


def test_python_names_become_flags() -> None:
    options = {"ctx_size": 4096, "metrics": True, "context_shift": False, "threads": None}
    assert from_options(options, NEW) == [
        Given("--ctx-size", "4096"),
        Given("--metrics"),
        Given("--no-context-shift"),
    ]


def test_python_names_are_checked() -> None:
    with pytest.raises(UsageError, match="--ctx-sise"):
        from_options({"ctx_sise": 1}, NEW)
    with pytest.raises(UsageError, match="needs a value"):
        from_options({"ctx_size": True}, NEW)


def test_help_of_something_else_is_refused() -> None:
    with pytest.raises(DflashError, match="lists no --model flag"):
        FlagTable.parse("usage: frobnicate [-h]\n")


def test_read_flags_runs_the_program_again_only_when_it_changed(tmp_path: Path) -> None:
    program = fake.make(tmp_path / "a build")
    first = read_flags(program)
    assert read_flags(program) is first
    (tmp_path / "a build" / "llama-server.json").write_text('{"help": "--model FNAME   x\\n--new N   y\\n"}')
    os.utime(program, (1, 1))
    assert read_flags(program).has("--new")


def test_a_program_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="is missing"):
        read_flags(tmp_path / "llama-server")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such library >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(DflashError, match="exit code 127: no such library"):
        read_flags(broken)
    plain = tmp_path / "plain"
    plain.write_text("x")
    with pytest.raises(DflashError, match="cannot be run"):
        read_flags(plain)


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused_in_words(text: str) -> None:
    with contextlib.suppress(DflashError):
        FlagTable.parse(text)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_command_line_is_split_or_refused_in_words(words: list[str]) -> None:
    try:
        parsed = NEW.split(words)
    except UsageError:
        return
    back = [word for flag in parsed.flags for word in flag.argv()]
    assert len(back) + len(parsed.words) + len(parsed.verbatim) >= len(words) - words.count("--")
