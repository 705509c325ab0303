from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.server import launch as module
from dflashcpp.server.flags import FlagTable
from dflashcpp.server.launch import Launch, compose, environment, read_api_key
from tests.support import fake_llama_server as fake

TABLE = FlagTable.parse(fake.HELP)
OURS = FlagTable.parse(
    fake.HELP
    + "--spec-draft-adaptive, --no-spec-draft-adaptive\n"
    + f"{'':40}as many as pay\n"
    + "--spec-draft-inject {lazy,eager}\n"
    + f"{'':40}when rows are injected\n"
)
MODEL, DRAFT = Path("/models/the target.gguf"), Path("/models/draft.gguf")


def made(*words: str, draft: Path | None = DRAFT, table: FlagTable = TABLE, **options: Any) -> Launch:
    parsed = table.split(words)
    options = {"depth": 7, "version": 2, **options}
    return compose(
        table, Path("/b/llama-server"), parsed.flags, parsed.verbatim, model=MODEL, draft=draft, **options
    )


def value(launch: Launch, name: str) -> str | None:
    argv = launch.argv
    return argv[argv.index(name) + 1] if name in argv else None


def test_a_drafter_is_never_passed_without_its_spec_type() -> None:
    launch = made()
    assert value(launch, "--model-draft") == str(DRAFT)
    assert value(launch, "--spec-type") == launch.spec_type == "draft-dflash"
    assert value(launch, "--model") == str(MODEL)


def test_the_defaults_that_suit_a_drafter_are_set_and_said() -> None:
    launch = made()
    assert value(launch, "--parallel") == "1"
    assert value(launch, "--spec-draft-n-max") == "4"
    assert value(launch, "--host") == "127.0.0.1"
    assert "--metrics" in launch.argv
    for name in ("--parallel 1", "--spec-draft-n-max 4", "--metrics", "--verbosity 4"):
        assert any(note.startswith(name) for note in launch.notes), name


def test_what_the_user_gave_wins_under_any_name_and_is_not_said_twice() -> None:
    launch = made(
        "-np",
        "2",
        "--spec-draft-n-max",
        "2",
        "-ngld",
        "3",
        recommended={"spec-draft-ngl": "all", "parallel": 4},
    )
    assert value(launch, "-np") == "2"
    assert "--parallel" not in launch.argv
    assert value(launch, "-ngld") == "3"
    assert "--spec-draft-ngl" not in launch.argv


def test_a_pairs_flags_are_used_where_the_user_gave_none() -> None:
    launch = made("-c", "100", recommended={"ctx-size": 4096, "flash-attn": "on"})
    assert value(launch, "-c") == "100"
    assert value(launch, "--flash-attn") == "on"


def test_n_max_above_the_trained_depth_is_clamped_with_a_word() -> None:
    launch = made("--spec-draft-n-max", "15")
    assert value(launch, "--spec-draft-n-max") == "7"
    assert any("15 is more than the drafter was trained for: 7" in text for text in launch.warnings)
    assert value(made(depth=3), "--spec-draft-n-max") == "3"


@pytest.mark.parametrize(
    ("words", "text"), [(("0",), "nothing would be drafted"), (("many",), "no whole number")]
)
def test_n_max_that_makes_no_sense_is_wrong_usage(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        made("--spec-draft-n-max", *words)


def test_blocks_that_do_not_fit_a_ubatch_are_refused_before_llama_server_aborts() -> None:
    with pytest.raises(UsageError, match="need 80 rows"):
        made("-np", "16", "-ub", "64")
    made("-np", "16", "-ub", "80")
    made("-np", "16", "-ub", "64", table=OURS)


def test_without_a_drafter_nothing_of_drafting_is_passed() -> None:
    launch = made("--spec-draft-n-max", "4", draft=None)
    assert not [word for word in launch.argv if "spec" in word or "draft" in word]
    assert launch.spec_type == "none"
    with pytest.raises(UsageError, match="needs a drafter"):
        made("--spec-type", "draft-dflash", draft=None)


def test_spec_type_none_with_a_drafter_is_a_contradiction() -> None:
    with pytest.raises(UsageError, match="nothing would be drafted"):
        made("--spec-type", "none")


def test_a_build_that_can_is_told_to_draft_as_many_tokens_as_pay() -> None:
    launch = made(table=OURS)
    assert "--spec-draft-adaptive" in launch.argv
    assert any(note.startswith("--spec-draft-adaptive: ") for note in launch.notes)
    assert "--spec-draft-adaptive" not in made().argv


def test_a_fixed_draft_length_can_be_had() -> None:
    argv = made("--no-spec-draft-adaptive", table=OURS).argv
    assert "--no-spec-draft-adaptive" in argv and "--spec-draft-adaptive" not in argv


def test_without_a_drafter_a_switch_of_drafting_is_left_out_with_a_word() -> None:
    launch = made("--spec-draft-adaptive", draft=None, table=OURS)
    assert "--spec-draft-adaptive" not in launch.argv
    assert any("means nothing without a drafter" in note for note in launch.notes)


def test_other_kinds_of_drafting_are_kept_with_a_warning() -> None:
    launch = made("--spec-type", "ngram-mod")
    assert launch.spec_type == "draft-dflash,ngram-mod"
    assert any("take turns" in text for text in launch.warnings)


def test_a_build_without_dflash_is_refused_in_words() -> None:
    with pytest.raises(DflashError, match="does not know --spec-type draft-dflash"):
        made(table=FlagTable.parse(fake.OLD_HELP))


def test_a_fork_without_a_flag_of_ours_is_not_given_it() -> None:
    assert "--metrics" not in made(draft=None, table=FlagTable.parse(fake.FORK_HELP)).argv


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-ctkd", "q8_0"), "acceptance drop"),
        (("--cache-type-v-draft", "q4_0"), "acceptance drop"),
        (("-ctk", "q8_0"), "3 to 4 tok/s"),
        (("--context-shift",), "context shift"),
        (("--mmproj", "x.gguf"), "images"),
        (("-np", "2"), "several slots"),
    ],
)
def test_risky_combinations_are_taken_with_the_reason(words: tuple[str, ...], text: str) -> None:
    assert any(text in warning for warning in made(*words).warnings)
    assert not any(text in warning for warning in made().warnings)


def test_a_harmless_value_of_a_risky_flag_is_not_warned_about() -> None:
    assert made("-ctkd", "f16", "-np", "1", "-sm", "layer").warnings == ()


@pytest.mark.parametrize(
    "words",
    [("-sm", "tensor"), ("-hf", "a/b"), ("-hfd", "a/b"), ("-mu", "http://x"), ("--api-key", "secret")],
)
def test_what_cannot_work_is_refused_with_the_way_out(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        made(*words)
    assert caught.value.hint


def test_split_mode_tensor_only_stops_a_drafter_that_cannot_do_it() -> None:
    assert made("-sm", "tensor", version=1).warnings
    assert not made("-sm", "tensor", draft=None).warnings


@pytest.mark.parametrize(
    "words", [("-hf", "a/b"), ("--hf-repo-draft", "a/b"), ("--api-key", "x"), ("-mu", "u")]
)
def test_a_double_dash_lets_nothing_pass_that_never_works_or_shows_a_key(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        made("--", *words)
    assert caught.value.hint


def test_a_context_beyond_the_trained_one_is_warned_about() -> None:
    def told(*words: str) -> str:
        return " ".join(made(*words, trained_context=8192).warnings)

    assert "uses 8192 for each slot" in told("-c", "1000000")
    assert "trained for" not in told("-c", "8192") + told() + told("-c", "16384", "-np", "2")


def test_flags_after_a_double_dash_are_passed_unseen() -> None:
    assert made("--", "--brand-new", "1").argv[-2:] == ["--brand-new", "1"]


def test_a_quantised_cache_turns_flash_attention_on() -> None:
    assert value(made("-ctv", "q8_0"), "--flash-attn") == "on"
    assert value(made("-ctv", "q8_0", "-fa", "off"), "-fa") == "off"


def test_a_host_that_lets_others_in_is_warned_about_unless_a_key_is_asked(tmp_path: Path) -> None:
    assert any("lets other machines in" in text for text in made("--host", "0.0.0.0").warnings)
    key = tmp_path / "key"
    key.write_text("# ours\n\nsecret\n")
    key.chmod(0o600)
    launch = made("--host", "0.0.0.0", "--api-key-file", str(key))
    assert launch.warnings == ()
    assert launch.url.startswith("http://127.0.0.1:")
    assert read_api_key(launch.api_key_file) == "secret"
    assert "secret" not in " ".join(launch.argv)


def test_a_key_file_others_can_read_or_that_is_missing_is_told(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o644)
    assert any("chmod 600" in text for text in made("--api-key-file", str(key)).warnings)
    with pytest.raises(DflashError, match="no such file"):
        made("--api-key-file", str(tmp_path / "none"))


def test_port_0_is_a_free_port_and_the_alias_holds_a_word_of_this_start() -> None:
    one, other = made("--port", "0", "--alias", "mine"), made("--port", "0", "--alias", "mine")
    assert one.port > 0
    assert value(one, "--alias") == f"mine,{one.nonce}"
    assert one.nonce != other.nonce
    assert [word for word in one.same_work() if "mine" in word] == ["mine"]


def test_a_port_that_is_no_number_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="no whole number"):
        made("--port", "http")


def test_the_environment_cannot_bring_a_drafter_into_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPEC_TYPE", "SPEC_DRAFT_MODEL", "MODEL", "PORT", "HOST", "ALIAS"):
        monkeypatch.setenv(f"LLAMA_ARG_{name}", "x")
    monkeypatch.setenv("LLAMA_ARG_THREADS", "3")
    kept = {name for name in environment() if name.startswith("LLAMA_ARG_")}
    assert kept == {"LLAMA_ARG_THREADS"}
    assert environment()["GGML_NO_BACKTRACE"] == "1"
    assert any("LLAMA_ARG_THREADS" in note for note in made().notes)


def test_the_key_of_the_environment_is_used_as_llama_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "one,two")
    assert read_api_key(None) == "one"
    monkeypatch.delenv("LLAMA_API_KEY")
    assert read_api_key(None) is None


def test_every_flag_of_the_risk_table_is_known_to_the_fake_build() -> None:
    """A misspelt flag in models/serving.toml would never warn."""
    rows = module.knowledge.table("models/serving.toml")["risk"]
    assert [row["flag"] for row in rows if TABLE.find(row["flag"]) is None] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--spec-draft-inject", "later"], "--spec-draft-inject later: no such value"),
        (["-np", "0"], "-np 0: a server needs a slot"),
        (["--spec-draft-ubatch-size", "-1"], "--spec-draft-ubatch-size -1: a number from 0 on"),
    ],
)
def test_values_that_llama_server_would_refuse_are_refused_before_the_start(
    words: list[str], text: str
) -> None:
    table = FlagTable.parse(
        fake.HELP
        + f"--spec-draft-inject {{lazy,eager}}\n{'':40}when\n--spec-draft-ubatch-size N\n{'':40}rows\n"
    )
    with pytest.raises(UsageError, match=text) as caught:
        made(*words, table=table)
    if "inject" in words[0]:
        assert caught.value.hint == "there are: lazy, eager"


def test_what_a_pair_recommends_for_drafting_is_not_said_without_a_drafter() -> None:
    launch = made(draft=None, recommended={"spec-draft-n-max": 4})
    assert not any("spec-draft-n-max" in note for note in launch.notes)
