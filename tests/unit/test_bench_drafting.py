"""The arithmetic and the tables of benchmarks/drafting.py, on results made up here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import draft_columns, draft_goals, draft_report, draft_results, draft_workloads, drafting
from benchmarks.draft_asking import Whole
from benchmarks.draft_columns import ALL, BASE, CONTROL, OFF, SWITCH, Column, Feature
from benchmarks.draft_figures import Figures, Sample, mix, spread
from benchmarks.draft_measuring import Setup, Text, Told, _converse_all, _switched_off, statistics_of
from benchmarks.draft_results import Results
from benchmarks.draft_texts import Verdict, counts, judge
from dflashcpp.cli._output import Output
from dflashcpp.errors import DflashError, UsageError
from dflashcpp.llamacpp import Build
from dflashcpp.stats import Timings

BASE_SPEED = 100.0
ADAPTIVE = Feature("adaptive", ("--adaptive",), ("--no-adaptive",), changes_length=True)
SAMPLING = Feature("sampling", ("--how", "q"), ("--how", "greedy"), temperatures=(1.0,))
ARENA = Feature("arena", env="arena")


def generated(column: str, ratios: dict[str, float], turn: int = 0, temperature: float = 0.0) -> list[Sample]:
    """Samples of a column that runs at these ratios of `BASE_SPEED`, prompts taking a second each."""
    return [
        Sample("generation", column, temperature, kind, turn, 100, seconds, 1 + seconds)
        for kind, ratio in ratios.items()
        for seconds in [100 / (BASE_SPEED * ratio)]
    ]


def of(*columns: list[Sample]) -> Figures:
    return Figures.of([sample for column in columns for sample in column], "generation")


def goal(found: list[draft_goals.Goal], word: str) -> draft_goals.Goal:
    (one,) = [each for each in found if word in each.name]
    return one


# -- medians, ratios, mixes -----------------------------------------------------------------------


def test_spread_is_median_lowest_highest_of_what_is_a_number() -> None:
    found = spread([3.0, None, 1.0, math.nan, 2.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.rounds) == (2.0, 1.0, 3.0, 3)
    assert found.text() == "2.00 [1.00..3.00]"


def test_spread_of_one_shows_no_range_and_of_none_is_none() -> None:
    assert spread([1.5]).text(1) == "1.5"  # type: ignore[union-attr]
    assert spread([None, math.inf]) is None


def test_mix_counts_every_workload_alike_and_kinds_of_one_workload_together() -> None:
    assert mix({"a": 4.0, "b": 1.0}) == pytest.approx(2.0)
    many = {"held-out/one": 4.0, "held-out/two": 1.0, "prose": 2.0}
    assert mix(many) == pytest.approx(2.0)
    assert mix({**many, "held-out/three": 2.0}) == pytest.approx(2.0)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is half as fast in the second round changes no ratio."""
    slow = [replace(s, seconds=2 * s.seconds) for s in generated(BASE, {"a": 1.0}, 1)]
    also = [replace(s, seconds=2 * s.seconds) for s in generated("x", {"a": 1.2}, 1)]
    found = of(generated(BASE, {"a": 1.0}), generated("x", {"a": 1.2}), slow, also).ratio("x", BASE, 0.0, "a")
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))
    assert found.rounds == 2


def test_the_ratio_of_a_round_that_one_side_lacks_is_not_made_up() -> None:
    figures = of(generated(BASE, {"a": 1.0}, 0), generated("x", {"a": 2.0}, 0), generated("x", {"a": 9.0}, 1))
    found = figures.ratio("x", BASE, 0.0, "a")
    assert found is not None and found.rounds == 1 and found.median == pytest.approx(2.0)
    assert figures.ratio("y", BASE, 0.0, "a") is None


def test_temperatures_are_kept_apart() -> None:
    figures = of(
        generated(BASE, {"a": 1.0}),
        generated("x", {"a": 2.0}),
        generated(BASE, {"a": 1.0}, temperature=1.0),
        generated("x", {"a": 0.5}, temperature=1.0),
    )
    assert figures.mix("x", BASE, 0.0).median == pytest.approx(2.0)  # type: ignore[union-attr]
    assert figures.mix("x", BASE, 1.0).median == pytest.approx(0.5)  # type: ignore[union-attr]


def test_speed_over_all_kinds_is_the_ratio_of_sums() -> None:
    figures = of(generated("x", {"a": 1.0, "b": 0.25}))
    assert figures.speed("x", 0.0).median == pytest.approx(200 / 5)  # type: ignore[union-attr]


def test_whole_requests_count_the_prompts() -> None:
    figures = of(generated(BASE, {"a": 1.0}), generated("x", {"a": 2.0}))
    assert figures.ratio("x", BASE, 0.0, "a", whole=True).median == pytest.approx(2 / 1.5)  # type: ignore[union-attr]


def test_a_mix_needs_every_kind_in_the_round() -> None:
    figures = of(
        generated(BASE, {"a": 1.0, "b": 1.0}),
        generated("x", {"a": 2.0, "b": 2.0}),
        generated(BASE, {"a": 1.0, "b": 1.0}, 1),
        generated("x", {"a": 8.0}, 1),
    )
    found = figures.mix("x", BASE, 0.0)
    assert found is not None and found.rounds == 1 and found.median == pytest.approx(2.0)


def test_the_mean_length_counts_steps_and_is_unknown_when_one_is() -> None:
    known = Sample("generation", "x", 0.0, "a", 0, 10, 1.0, drafted=8, accepted=6, verify_steps=4)
    other = replace(known, kind="b", accepted=2, verify_steps=4)
    assert of([known, other]).length("x", 0.0) == pytest.approx(2.0)
    assert known.length == pytest.approx(2.5)
    assert of([known, replace(other, verify_steps=None)]).length("x", 0.0) is None
    assert of([replace(known, drafted=0)]).length("x", 0.0) is None


def test_steps_without_a_draft_count_where_the_engine_tells_them() -> None:
    known = Sample("generation", "x", 0.0, "a", 0, 10, 1.0, drafted=8, accepted=6, verify_steps=4)
    assert of([known]).drafted_a_step("x", 0.0) == pytest.approx(2.0)
    told = replace(known, lengths=(4, 0, 4))
    assert of([told]).drafted_a_step("x", 0.0) == pytest.approx(1.0)
    assert of([replace(known, drafted=0, verify_steps=0)]).drafted_a_step("x", 0.0) is None


# -- goals ----------------------------------------------------------------------------------------


def full_run(ours: float = 1.3, code: float = 1.5, prose: float = 1.0) -> list[Sample]:
    kinds = ("coding", "held-out/code", "prose")
    samples = generated(BASE, dict.fromkeys(kinds, 1.0))
    samples += generated("pristine 1", dict(zip(kinds, (1.0, 1.0, 0.9), strict=True)))
    samples += generated("pristine 4", dict(zip(kinds, (1.2, 1.2, 0.5), strict=True)))
    return samples + generated(ALL, dict(zip(kinds, (ours, code, prose), strict=True)))


def test_the_best_fixed_length_is_chosen_by_the_mix() -> None:
    figures = Figures.of(full_run(), "generation")
    assert draft_goals.best_fixed(figures, 0.0) == "pristine 1"
    assert draft_goals.best_fixed(figures, 1.0) is None


def test_the_best_fixed_length_may_differ_by_temperature() -> None:
    warm = [replace(s, temperature=1.0) for s in full_run()]
    warm = [replace(s, seconds=s.seconds / 3) if s.column == "pristine 4" else s for s in warm]
    figures = Figures.of([*full_run(), *warm], "generation")
    assert [draft_goals.best_fixed(figures, t) for t in (0.0, 1.0)] == ["pristine 1", "pristine 4"]


def test_goals_tell_figure_and_whether_they_are_met() -> None:
    found = draft_goals.goals(full_run(), [])
    best = goal(found, "pristine's best")
    assert best.came == pytest.approx((1.3 * 1.5 * 1.0 / 0.9) ** (1 / 3))
    assert best.met and best.note == "pristine 1"
    code = goal(found, "code")
    assert code.came == pytest.approx(math.sqrt(1.3 * 1.5)) and code.met


def test_one_kind_that_loses_is_found_behind_a_good_mix() -> None:
    worst = goal(draft_goals.goals(full_run(ours=3.0, code=3.0, prose=0.97), []), "worst kind")
    assert worst.came == pytest.approx(0.97)
    assert worst.met is False and worst.note == "prose"


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = draft_goals.goals(full_run(), [])
    for word in ("draft call", "windowed", "full drafter", "4 slots", "texts"):
        one = goal(found, word)
        assert one.came is None and one.met is None and "not measured" in one.row()


def test_a_draft_call_is_told_in_milliseconds_and_must_be_short() -> None:
    calls = [Sample("call", "pristine 3", 0.0, "4 rows", 0, 100, 0.31)]
    calls.append(Sample("call", ALL, 0.0, "4 rows", 0, 100, 0.2))
    one = goal(draft_goals.goals(calls, []), "draft call")
    assert one.came == pytest.approx(2.0) and one.met and "3.10" in one.note
    slower = [calls[0], replace(calls[1], seconds=0.23)]
    assert goal(draft_goals.goals(slower, []), "draft call").met is False


def test_reading_and_slots_are_compared_with_no_drafter() -> None:
    rows = [
        Sample("reading", BASE, 0.0, draft_goals.WINDOWED, 0, 1000, 10.0),
        Sample("reading", BASE, 0.0, draft_goals.FULL, 0, 1000, 10.0),
        Sample("reading", ALL, 0.0, draft_goals.WINDOWED, 0, 1000, 10.2),
        Sample("reading", ALL, 0.0, draft_goals.FULL, 0, 1000, 12.5),
        Sample("slots", BASE, 0.0, "4 slots", 0, 500, 10.0),
        Sample("slots", ALL, 0.0, "4 slots", 0, 500, 9.0),
    ]
    found = draft_goals.goals(rows, [])
    assert goal(found, "windowed").met is True
    assert goal(found, "full drafter").came == pytest.approx(0.8)
    assert goal(found, "full drafter").met is False
    assert goal(found, "4 slots").came == pytest.approx(10 / 9)


def test_one_different_text_misses_the_goal_and_ties_do_not() -> None:
    words = ["identical", "tie", "identical"]
    verdicts = [Verdict(ALL, 0, ("a", 0, n), word, word) for n, word in enumerate(words)]
    assert goal(draft_goals.goals([], verdicts), "texts").met is True
    verdicts.append(Verdict("only adaptive", 0, ("a", 0, 9), "different", "DIFFERENT"))
    assert goal(draft_goals.goals([], verdicts), "texts").met is False


def test_a_different_text_of_pristine_is_not_ours() -> None:
    verdicts = [Verdict("pristine 4", 0, ("a", 0, 0), "different", "DIFFERENT")]
    assert goal(draft_goals.goals([], verdicts), "texts").came is None


# -- columns --------------------------------------------------------------------------------------

TABLE = draft_columns.Table((1, 2, 4), (0.0, 1.0), (ADAPTIVE, SAMPLING, ARENA))


def by_name(columns: list[Column]) -> dict[str, Column]:
    assert len({column.name for column in columns}) == len(columns)
    return {column.name: column for column in columns}


def test_baselines_have_no_drafter_and_pristine_every_length() -> None:
    columns = by_name(draft_columns.make(TABLE, TABLE.features, 4))
    assert columns[BASE].n_max is None and not columns[BASE].ours
    assert columns[CONTROL].n_max is None and columns[CONTROL].ours
    assert [columns[f"pristine {n}"].n_max for n in (1, 2, 4)] == [1, 2, 4]
    assert not any(columns[f"pristine {n}"].flags or columns[f"pristine {n}"].off for n in (1, 2, 4))


def test_the_length_of_ours_is_always_among_pristines() -> None:
    assert "pristine 6" in by_name(draft_columns.make(TABLE, TABLE.features, 6))


def test_features_are_off_alone_and_on() -> None:
    columns = by_name(draft_columns.make(TABLE, TABLE.features, 4))
    off, only, every = columns[OFF], columns["only arena"], columns[ALL]
    assert off.flags == ("--no-adaptive", "--how", "greedy") and off.off == ("arena",)
    assert only.flags == off.flags and only.off == ()
    assert every.flags == ("--adaptive", "--how", "q") and every.off == ()
    assert columns["only adaptive"].flags == ("--adaptive", "--how", "greedy")


def test_a_ratio_is_to_what_was_measured_by_turns() -> None:
    """The machine was half as fast when the column had its turn: the baseline's own row says nothing then."""
    row = Sample("generation", "pristine 2", 0.0, "a", 0, 100, 2.0, 3.0)
    samples = [
        *generated(BASE, {"a": 1.0}),
        replace(row, beside=40.0, whole_beside=30.0),  # 50 a second
        replace(row, column=ALL, seconds=1.25, beside=100.0, whole_beside=50.0),  # 80
    ]
    figures = Figures.of(samples, "generation")
    assert figures.ratio("pristine 2", BASE, 0.0, "a") == spread([1.25])
    assert figures.ratio(ALL, BASE, 0.0, "a") == spread([0.8])
    assert figures.ratio(ALL, "pristine 2", 0.0, "a") == spread([0.64])
    assert figures.ratio(BASE, BASE, 0.0, "a") == spread([1.0])
    whole = figures.ratio("pristine 2", BASE, 0.0, "a", whole=True)
    assert whole is not None and whole.median == pytest.approx(100 / 3.0 / 30.0)


def test_a_feature_is_measured_where_it_matters() -> None:
    only = by_name(draft_columns.make(TABLE, TABLE.features, 4))["only sampling"]
    assert only.measured_at(1.0) and not only.measured_at(0.0)


def test_one_draft_call_is_timed_without_what_changes_its_rows() -> None:
    column = draft_columns.fixed_rows(TABLE.features, 4)
    assert column.n_max == 3 and column.flags == ("--no-adaptive", "--how", "q") and column.off == ()


def test_a_trial_is_measured_alone_and_is_no_part_of_all() -> None:
    trial = Feature("block", ("--block", "8"), ("--block", "0"), trial=True)
    columns = by_name(draft_columns.make(TABLE, [ADAPTIVE, trial], 4))
    assert columns["only block"].flags == ("--no-adaptive", "--block", "8")
    assert columns[ALL].flags == ("--adaptive", "--block", "0")
    assert draft_columns.fixed_rows([trial], 4).flags == ("--block", "0")


def test_a_head_of_its_own_is_another_file_of_the_drafter() -> None:
    head = Feature("head Q4_0", head="Q4_0")
    columns = by_name(draft_columns.make(TABLE, [ADAPTIVE, head], 4))
    assert (columns[OFF].head, columns["only adaptive"].head) == ("", "")
    assert (columns["only head Q4_0"].head, columns[ALL].head) == ("Q4_0", "Q4_0")
    assert columns["only head Q4_0"].flags == ("--no-adaptive",)


def test_selecting_keeps_the_baseline_and_refuses_a_name_that_is_none() -> None:
    columns = draft_columns.make(TABLE, TABLE.features, 4)
    assert [one.name for one in draft_columns.select(columns, ["pristine 4"])] == [BASE, "pristine 4"]
    with pytest.raises(UsageError, match="gigantic"):
        draft_columns.select(columns, ["gigantic"])


def test_features_a_build_does_not_know_are_named_with_the_reason(tmp_path: Path) -> None:
    help_text = "\n".join(f"{name:40}text" for name in ("-m, --model FILE", "--how {q,greedy}"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama-server"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{help_text}\nEND\n")
    program.chmod(0o755)
    (tmp_path / "bin" / "libllama.so").write_bytes(b"\0DFLASHCPP_OFF\0mask\0")
    build = Build("b", "c", (), "d", "cpu", tmp_path)
    found = draft_columns.unknown(TABLE.features, build)
    assert set(found) == {"adaptive"} and "--adaptive" in found["adaptive"]
    rows = [Feature("mask", env="mask", patch="a-mask"), Feature("sort", env="sort", patch="a-sort")]
    patched = replace(build, patches=("0001-a-mask.patch",))
    assert set(draft_columns.unknown(rows, patched)) == {"sort"}
    assert not draft_columns.unknown(rows, build), "nobody says which patches it has"
    (tmp_path / "bin" / "libllama.so").write_bytes(b"\0nothing\0")
    assert "DFLASHCPP_OFF" in draft_columns.unknown(TABLE.features, build)["arena"]


def test_the_shipped_table_is_whole() -> None:
    table = draft_columns.read_table()
    assert set(table.lengths) >= {1, 2, 3, 4, 7} and set(table.temperatures) == {0.0, 0.7, 1.0}
    assert len({one.name for one in table.features}) == len(table.features)
    for one in table.features:
        assert (one.on and one.off) or one.env or one.head, f"{one.name} cannot be turned off"


def test_the_switch_is_set_only_while_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(SWITCH, "before")
    with _switched_off(["one", "two"]):
        assert os.environ[SWITCH] == "one,two"
    with _switched_off([]):
        assert SWITCH not in os.environ
    assert os.environ[SWITCH] == "before"


# -- workloads ------------------------------------------------------------------------------------


def test_six_workloads_are_there_and_the_coding_one_has_turns() -> None:
    found = {one.kind: one for one in draft_workloads.load()}
    groups = {kind.partition("/")[0] for kind in found}
    assert groups >= {"coding", "structured", "prose", "japanese", "long-document", "held-out"}
    assert all(len(one.turns) > 1 for one in found["coding"].conversations)
    assert all(
        any("\u3040" <= c <= "\u30ff" for c in one.turns[0]) for one in found["japanese"].conversations
    )
    assert {"held-out/code", "held-out/explain"} <= set(found)


def test_a_long_document_stands_before_its_question() -> None:
    (long,) = draft_workloads.load(["long-document"])
    for one in long.conversations:
        assert len(one.turns[0].split()) > 500 and one.turns[0].rstrip().endswith("sentence.")
        assert len(one.turns) > 3  # one short answer is too little to time


class Talker:
    """A client whose template shows what was said so far."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply_template(self, messages: list[dict[str, str]]) -> str:
        return "|".join(one["content"] for one in messages)


def test_both_servers_are_asked_turn_by_turn_and_keep_their_own_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str, int]] = []

    def answer(client: Talker, prompt: str, tokens: int, temperature: float, seed: int) -> Whole:
        asked.append((client.name, prompt, seed))
        return Whole(f"{client.name}{len(prompt)}", (1,), Timings(1, 1.0, 5, 10.0))

    monkeypatch.setattr("benchmarks.draft_measuring.ask", answer)
    talk = draft_workloads.Workload("talk", 8, (draft_workloads.Conversation(("a", "b", "c")),))
    told = _converse_all([Talker("x"), Talker("y")], "ours", 0.0, 0, talk)  # type: ignore[list-item]

    assert [name for name, _, _ in asked] == ["x", "y", "y", "x", "x", "y"]  # never far from each other
    assert [prompt for name, prompt, _ in asked if name == "y"] == ["a", "a|y1|b", "a|y1|b|y6|c"]
    assert [seed for _, _, seed in asked] == [1000, 1000, 1001, 1001, 1002, 1002]
    assert [one.amount for one in told] == [12, 12]
    assert [text.place for text in told[1].texts] == [("talk", 0, 0), ("talk", 0, 1), ("talk", 0, 2)]


def test_workloads_can_be_cut_and_unknown_ones_are_refused() -> None:
    (long,) = draft_workloads.load(["prose"])
    cut = long.shorter(1, 10)
    assert len(cut.conversations) == 1 and cut.max_tokens == 10
    assert long.shorter(99, 9999) == long
    with pytest.raises(UsageError, match="poetry"):
        draft_workloads.load(["poetry"])


def test_a_damaged_workload_is_named(tmp_path: Path) -> None:
    for text in ("max_tokens = 1", "max_tokens = 'x'\n", "max_tokens = 1\n[[conversation]]\n", "[["):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(DflashError, match=r"bad\.toml"):
            draft_workloads.load(folder=tmp_path)


def test_a_long_text_has_as_many_words_as_asked() -> None:
    assert len(draft_workloads.long_text(3000).split()) == 3000


# -- what servers tell ----------------------------------------------------------------------------


def test_the_first_token_counts_with_the_prompt_and_unknown_steps_stay_unknown() -> None:
    told = Told()
    told.add(Timings(10, 50.0, 11, 100.0, None, 8, 6, 4))
    assert (told.amount, told.seconds, told.steps) == (10, 0.1, 4)
    told.add(Timings(10, 50.0, 11, 100.0, None, 8, 6, None))
    told.add(Timings(10, 50.0, 11, 100.0, None, 8, 6, 4))
    assert told.steps is None and told.accepted == 18


def test_steps_by_length_add_up() -> None:
    told = Told()
    told.add(Timings(10, 50.0, 11, 100.0, None, 3, 1, 2, (), (1, 1, 1)))
    told.add(Timings(10, 50.0, 11, 100.0, None, 3, 1, 1, (), (2, 0, 0, 1)))
    assert told.lengths == (3, 1, 1, 1)


def test_an_answer_without_drafts_leaves_the_steps_known() -> None:
    told = Told()
    told.add(Timings(10, 50.0, 11, 100.0))
    told.add(Timings(10, 50.0, 11, 100.0, None, 8, 6, 4))
    assert told.steps == 4


def test_the_last_statistics_of_a_log_count() -> None:
    line = (
        "I spec common_specu: statistics     draft-dflash: #calls(b,g,a) = {0:4} {1:6} {1:6}, #gen drafts = 6"
        ", #mean acc len = 2.1, #acc rate/pos = (1.000, 0.5), dur(b,g,a) = 0.001, {2:.3f}, 0.010 ms"
    )
    log = "\n".join(["start", line.format(1, 12, 40.0), "other", line.format(2, 40, 120.5)])
    assert statistics_of(log) == (40, 120.5)
    assert statistics_of("nothing") is None


def test_texts_that_agree_need_no_server(tmp_path: Path) -> None:
    setup = Setup(tmp_path / "none", tmp_path / "none", {}, 1, tmp_path)
    texts = [Text(BASE, 0, ("a", 0, 0), "p", (1, 2)), Text("x", 0, ("a", 0, 0), "p", (1, 2))]
    texts += [Text(BASE, 0, ("a", 0, 1), "p then", (3,)), Text("x", 0, ("a", 0, 1), "p else", (3,))]
    found = judge(setup, texts)
    assert [one.word for one in found] == ["identical", "other prompt"]
    assert counts(found)["x"] == {"identical": 1, "other prompt": 1}


# -- results and tables ---------------------------------------------------------------------------


def results() -> Results:
    machine = {"cpu": "A", "cores": 2, "memory_gib": 1, "system": "L", "load_before": 0.1, "threads": 2}
    machine |= {"compiler": "cc", "builds": {"ours": "o", "pristine": "p"}, "patches": ["0001"]}
    verdicts = [Verdict(ALL, 0, ("coding", 0, 0), "tie", "a tie at token 3")]
    return Results(machine, full_run(), verdicts, {"arena": "not in this build"})


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    made = results()
    made.save(tmp_path / "run.json")
    assert draft_results.load(tmp_path / "run.json") == made
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DflashError, match=r"bad\.json"):
        draft_results.load(tmp_path / "bad.json")


def test_runs_are_merged_as_further_rounds_but_not_of_other_builds() -> None:
    merged = draft_results.merge([results(), results()])
    found = Figures.of(merged.samples, "generation").mix(ALL, BASE, 0.0)
    assert found is not None and found.rounds == 2
    other = results()
    other.machine["builds"] = {"ours": "another"}
    with pytest.raises(DflashError, match="different builds"):
        draft_results.merge([results(), other])


def test_the_tables_show_ratios_goals_and_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    draft_report.show(replace(results(), samples=full_run(prose=0.5)), Output())
    shown = capsys.readouterr().out
    for part in ("pristine 4", "Goals", "left out: arena", "a tie at token 3", "NOT MET", "Whole requests"):
        assert part in shown
    assert "WARNING" not in shown


def test_a_busy_machine_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    made = results()
    made.samples[0] = replace(made.samples[0], foreign=0.3)
    draft_report.show(made, Output())
    assert "30 %" in capsys.readouterr().out


def test_a_kept_run_is_shown_as_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results().save(tmp_path / "run.json")
    assert drafting.main(["--from", str(tmp_path / "run.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["met"] for one in found["goals"]} == {True, None}
    assert drafting.main(["--from", str(tmp_path / "missing.json"), "--json"]) == 2


def test_a_missed_goal_is_an_exit_code(tmp_path: Path) -> None:
    made = replace(results(), samples=full_run(prose=0.5))
    made.save(tmp_path / "run.json")
    assert drafting.main(["--from", str(tmp_path / "run.json"), "--json"]) == 1


# -- plans ----------------------------------------------------------------------------------------


def plan(*arguments: str) -> drafting.Plan:
    return drafting.make_plan(drafting._parser().parse_args(arguments), TABLE, TABLE.features)


def test_a_quick_run_keeps_the_columns_the_goals_need() -> None:
    names = [column.name for column in plan("--quick").columns]
    assert names == [BASE, "pristine 2", "pristine 4", OFF, ALL]
    assert plan("--quick").rounds == 1 and plan().rounds == 3 and plan("--quick", "--rounds", "2").rounds == 2


def test_every_round_measures_every_setting_once_in_another_order() -> None:
    made = plan()
    orders = [list(drafting._settings(made, turn)) for turn in range(3)]
    assert len({tuple((t, c.name) for t, c in order) for order in orders}) == 3
    assert len({frozenset((t, c.name) for t, c in order) for order in orders}) == 1
    assert (0.0, "only sampling") not in {(t, c.name) for t, c in orders[0]}
