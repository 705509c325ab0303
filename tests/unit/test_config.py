from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashcpp import config
from dflashcpp.errors import DflashError

PROFILE = """\
# my machines
pair = "smollm2-135m"   # the small one

[remote.a4000]
host = "gpu.example"  # rented
remote_port = 9001
arguments = [
  "-c", "32768",  # long
]

[remote."two words"]
pair = "x"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "config.toml"
    path.parent.mkdir()
    path.write_text(PROFILE)
    return path


def test_profile_reads_what_is_set_and_defaults_the_rest(file: Path) -> None:
    profile = config.profile("a4000", file)
    assert (profile.host, profile.remote_port, profile.local_port) == ("gpu.example", 9001, 8001)
    assert profile.arguments == ("-c", "32768")
    assert config.default_pair(file) == "smollm2-135m"


def test_profile_without_host_is_the_host_of_its_name_and_an_unknown_name_is_a_plain_host(file: Path) -> None:
    assert config.profile("two words", file).host == "two words"
    assert config.profile("root@10.0.0.7", file) == config.Profile("root@10.0.0.7", "root@10.0.0.7")


def test_no_file_is_an_empty_config(tmp_path: Path) -> None:
    assert config.load(tmp_path / "none.toml") == {}
    assert config.default_pair(tmp_path / "none.toml") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[remote.x]\npasswort = 1\npassword = 'p'", "passwort"),
        ("[remote.x]\nhosst = 'h'", "hosst"),
        ("[remote.x]\nremote_port = 70000", "70000"),
        ("[remote.x]\nremote_port = true", "True"),
        ("[remote.x]\narguments = 'c'", "list"),
        ("[remote.x]\nhost = ''", "host"),
        ("remote = 3", "remote"),
        ("[remote]\nx = 3", "remote"),
        ("pair = [", "TOML"),
        ("pair = 3", "pair"),
    ],
)
def test_a_senseless_config_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(DflashError, match=words):
        config.profiles(path)
        config.default_pair(path)


def test_a_secret_in_a_profile_is_refused_without_repeating_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[remote.x]\napi_key = 'hunter2'")
    with pytest.raises(DflashError, match="secrets do not belong") as caught:
        config.profiles(path)
    assert "hunter2" not in f"{caught.value.message}{caught.value.hint}"


def test_setting_a_value_keeps_comments_order_and_mode(file: Path) -> None:
    file.chmod(0o640)
    config.set_value(["pair"], "muse-glimmer-30b", file)
    config.set_value(["remote", "a4000", "arguments"], ["-c", "1"], file)
    config.set_value(["remote", "a4000", "local_port"], 8002, file)
    text = file.read_text()
    assert text.startswith('# my machines\npair = "muse-glimmer-30b"\n') and '"gpu.example"  # rented' in text
    profile = config.profile("a4000", file)
    assert (profile.arguments, profile.local_port) == (("-c", "1"), 8002)
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]


def test_setting_makes_the_file_and_the_table(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    config.set_value(["remote", "a b", "host"], "h", path)
    config.set_value(["pair"], "p", path)
    assert tomllib.loads(path.read_text()) == {"pair": "p", "remote": {"a b": {"host": "h"}}}


def test_an_interrupted_setting_leaves_the_file_as_it_was_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, done = file.read_text(), os.open

    def interrupted(*arguments: Any, **options: Any) -> int:
        number = done(*arguments, **options)
        if len(list(file.parent.iterdir())) > 1:
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        config.set_value(["pair"], "other", file)
    assert file.read_text() == before and list(file.parent.iterdir()) == [file]


def test_setting_follows_a_link_to_the_real_file(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles.toml", tmp_path / "config.toml"
    real.write_text("")
    link.symlink_to(real)
    config.set_value(["pair"], "p", link)
    assert link.is_symlink() and config.default_pair(real) == "p"


def test_a_value_that_cannot_be_set_by_a_line_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("remote = {a = {host = 'h'}}\n")
    with pytest.raises(DflashError, match="cannot be set"):
        config.set_value(["remote", "a", "host"], "i", path)
    assert path.read_text() == "remote = {a = {host = 'h'}}\n"


@given(key=st.text(min_size=1, max_size=8), value=st.text(max_size=20))
def test_any_text_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str
) -> None:
    path = tmp_path_factory.mktemp("c") / "config.toml"
    path.write_text("# first\n[other]\nx = 1\n")
    try:
        config.set_value(["remote", key, "pair"], value, path)
        config.set_value(["pair"], value, path)
    except UnicodeEncodeError:
        return  # lone surrogates are no text
    assert config.load(path) == {"pair": value, "other": {"x": 1}, "remote": {key: {"pair": value}}}
