"""The plan of a known pair, from facts alone: published numbers, room, savings, refusals."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from dflashcpp.cli.app import run
from dflashcpp.errors import DflashError, UsageError
from dflashcpp.memory import as_dict, plan
from dflashcpp.memory.planning import Plan
from dflashcpp.pairs import list_pairs
from tests.support.sparse_models import TINY, write_drafter, write_target

MUSE = ("-c", "131072", "-ub", "512", "-np", "1")


def _muse(*flags: str, **more: object) -> Plan:
    return plan("muse-glimmer-30b", flags=(*MUSE, *flags), with_savings=False, **more)  # type: ignore[arg-type]


def test_the_unpatched_engine_needs_what_was_published() -> None:
    made = _muse(patched=False)
    assert made.mib("target", "kv", "device") == 1664.00
    assert made.mib("target", "kv_swa", "device") == 97.50
    assert made.mib("target", "compute", "device") == 273.52
    assert made.mib("draft", "kv_swa", "device") == 50.00
    assert made.mib("draft", "weights", "device") == 1556.95
    assert made.mib("draft", "compute", "device") == pytest.approx(462.67, rel=0.02)


def test_the_published_totals_come_out_for_both_drafters() -> None:
    second, first = _muse().published
    assert first["planned"]["draft_weights"] == 1543.17
    assert first["planned"]["draft_compute"] == 407.62
    assert first["total"] == 14838.95
    assert second["total"] == 14907.78


def test_both_drafters_and_both_engines_are_in_the_json_by_name() -> None:
    data = as_dict(_muse())
    first, second = data["drafters"]["v1"], data["drafters"]["v2"]
    assert first["unpatched"] == {"weights": 1543.17, "kv": 50.0, "compute": 407.62, "total": 14838.95}
    assert second["unpatched"]["weights"] == 1556.95 and second["unpatched"]["total"] == 14907.78
    assert second["unpatched"]["compute"] == pytest.approx(462.67, rel=0.02)
    target = data["engines"]["unpatched"]["target"]
    assert (target["kv"], target["kv_swa"], target["compute"]) == (1664.0, 97.5, 273.52)
    patched = second["patched"]
    parts = patched["weights"] + patched["kv"] + patched["compute"]
    assert patched["total"] == pytest.approx(12838.16 + parts, abs=0.011)
    assert patched["compute"] < second["unpatched"]["compute"] / 20


def test_the_same_pair_on_the_cpu_has_its_weights_in_the_machines_memory() -> None:
    made = plan("muse-glimmer-30b", flags=("-c", "4096", "-ngl", "0"), with_savings=False)
    assert made.mib("target", "weights", "host") == 10803.14
    assert made.total > 10803.14 and made.published[0]["total"] is not None


def test_every_known_pair_can_be_planned_before_any_download(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for pair in list_pairs():
        made = plan(pair.name, flags=("-c", "8192"), with_savings=False)
        assert made.target.known and made.mib("target", "weights") > 90
        assert any("planned from known facts" in text for text in made.warnings)


def test_a_hybrid_pair_counts_its_states_and_the_size_of_its_file_has_a_band(own_cache: Path) -> None:
    made = plan("qwen3.8-27b", flags=("-c", "8192", "--spec-draft-n-max", "4"), with_savings=False)
    assert made.mib("target", "kv", "device") == 16 * 8192 * 2 * 4 * 256 * 2 / 2**20
    states = 48 * 4 * (128 * 6144 + 3 * (6144 + 2 * 16 * 128)) * 5
    assert made.mib("target", "recurrent", "device") == pytest.approx(states / 2**20, abs=0.005)
    line = next(line for line in made.lines if (line.context, line.kind) == ("target", "weights"))
    assert (line.origin, line.error) == ("published", 0.1)
    assert made.mib("draft", "weights", "device") == 1079.61


def test_a_target_that_is_not_here_has_published_weights_and_says_so() -> None:
    line = next(line for line in _muse().lines if line.kind == "weights" and line.context == "target")
    assert (line.mib, line.origin) == (10803.14, "published")


def test_our_engine_needs_a_twentieth_for_the_drafters_compute_buffer() -> None:
    assert _muse().mib("draft", "compute", "device") < _muse(patched=False).mib("draft", "compute") / 20


def test_reading_the_drafters_layers_adds_their_rows_to_the_target() -> None:
    assert _muse().mib("target", "extraction", "device") == pytest.approx(5 * 512 * 6656 * 4 / 2**20)


def test_it_fits_or_says_by_how_much_not() -> None:
    enough = _muse(device_memory=16000)
    tight = _muse(device_memory=14000)
    assert enough.fits and enough.short == 0
    assert not tight.fits and tight.short == pytest.approx(tight.band[1] - 14000)


def test_the_largest_context_fits_and_the_next_one_does_not() -> None:
    made = _muse(device_memory=13500, max_context=True)
    assert made.largest_context and 0 < made.largest_context < 131072
    for step, fits in ((0, True), (256, False)):
        size = str(made.largest_context + step)
        again = plan("muse-glimmer-30b", flags=("-c", size), device_memory=13500, with_savings=False)
        assert again.fits is fits


def test_a_device_too_small_for_the_weights_fits_no_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert _muse(device_memory=100, max_context=True).largest_context == 0
    assert run(["plan", "muse-glimmer-30b", "--device-memory", "100", "--max-context"]) == 0
    assert "largest context that fits: none" in capsys.readouterr().out


@pytest.mark.parametrize("memory", [0.0, -3.0, float("nan"), float("inf")])
def test_memory_that_is_none_is_refused(memory: float) -> None:
    with pytest.raises(UsageError, match="--device-memory"):
        _muse(device_memory=memory)


def test_savings_name_a_quantised_cache_last_with_its_price() -> None:
    made = plan("muse-glimmer-30b", flags=MUSE)
    flags = [row.flags for row in made.savings]
    assert flags[-1] == "-ctk q8_0 -ctv q8_0"
    assert "3 to 4 tok/s" in made.savings[-1].cost
    assert flags.index("-ub 256") < flags.index("-c 65536") < flags.index("no drafter")


def test_every_saving_really_frees_what_it_says() -> None:
    made = plan("muse-glimmer-30b", flags=MUSE)
    row = next(row for row in made.savings if row.flags == "-ub 256")
    assert made.total - _muse("-ub", "256").total == pytest.approx(row.mib, abs=0.02)


def test_a_pristine_plan_names_the_patched_build_first() -> None:
    made = plan("muse-glimmer-30b", flags=MUSE, patched=False)
    assert "patched build" in made.savings[0].flags
    assert made.savings[0].cost == "nothing"


def test_flags_that_cost_nothing_are_passed_over() -> None:
    free = ("-t", "4", "--spec-type", "draft-dflash", "--no-warmup", "--port", "0", "--jinja", "--temp=0.5")
    assert _muse(*free).total == _muse().total
    with pytest.raises(UsageError, match="--port needs a value"):
        _muse("--port")


@pytest.mark.parametrize(
    ("flags", "cells"),
    [
        (("-np", "1", "-cd", "5000"), 5120),
        (("-np", "1", "--spec-draft-ctx-size", "1"), 256),
        (("-np", "4", "-cd", "100"), 4 * 256),
        (("-np", "1", "-cd", "100000"), 8192),
        (("-np", "1", "-cd", "0"), 8192),
    ],
)
def test_a_bound_of_the_draft_cache_holds_a_block_and_an_injection_for_every_slot(
    flags: tuple[str, ...], cells: int, tmp_path: Path
) -> None:
    target, drafter = write_target(tmp_path / "t.gguf", TINY), write_drafter(tmp_path / "d.gguf", TINY, 1)
    made = plan(target=target, drafter=drafter, flags=("-c", "8192", *flags), engine=False)
    row = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 2
    assert made.mib("draft", "kv") == pytest.approx(cells * row / 2**20, abs=0.005)
    bound = any(row.flags == "--spec-draft-ctx-size 4096" for row in made.savings)
    assert bound is (flags[-1] == "0")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("-c",), "-c"),
        (("-ctk", "q3_z"), "q3_z"),
        (("-ub", "many"), "many"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_flags_that_mean_nothing_are_refused_by_name(flags: tuple[str, ...], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        plan("muse-glimmer-30b", flags=flags)


def test_an_unknown_pair_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DflashError, match="no pair named"):
        plan("muse-glimmer-31b")


def test_json_keeps_the_promised_keys_and_every_line_its_origin() -> None:
    made = as_dict(plan("muse-glimmer-30b", flags=MUSE, device_memory=16000))
    assert {"weights", "kv", "kv_swa", "compute"} <= set(made["target"])
    assert {"weights", "kv", "compute"} <= set(made["draft"])
    assert made["fits"] is True
    assert all(line["origin"] in ("exact", "formula", "published") for line in made["lines"])
    assert all({"flags", "mib"} <= set(row) for row in made["savings"])
    assert made["engines"]["unpatched"]["draft"]["kv"] == 50.0
    shown = sum(line["mib"] for line in made["lines"] if line["place"] == "device")
    assert made["total"] == pytest.approx(shown, abs=0.005)


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "muse-glimmer-30b", *MUSE, "--device-memory", "16000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_the_command_says_short_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "muse-glimmer-30b", *MUSE, "--device-memory", "14000"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


def test_the_command_refuses_a_pair_with_a_target_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "muse-glimmer-30b", "-m", "target.gguf"]) == 2
    assert "not both" in capsys.readouterr().err
