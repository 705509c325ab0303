"""Planned, engine and process side by side; growth; where memory ran out; learned residuals."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dflashcpp.memory import residuals
from dflashcpp.memory.account import Account, Sample, Watch, growth, out_of_memory, sample
from dflashcpp.memory.engine import EngineMemory, Row, parse_log
from dflashcpp.memory.lines import Line
from dflashcpp.memory.model import read_model
from dflashcpp.memory.planning import Plan
from dflashcpp.memory.settings import Settings
from dflashcpp.memory.sources import PlannedHeader

LOGS = Path(__file__).parent / "memory_logs"
ENGINE = EngineMemory((Row("target", "compute", "CUDA0", 100.0), Row("draft", "weights", "CUDA0", 50.0)))


def _plan(*lines: Line) -> Plan:
    keys = {"embedding_length": 8, "block_count": 0, "attention.head_count": 1}
    header = PlannedHeader(
        "none", {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in keys.items()}
    )
    return Plan(lines, Settings(), read_model(header))


def test_our_own_process_has_memory_and_one_that_is_gone_has_none() -> None:
    mine = sample(os.getpid())
    assert mine is not None and 1 < mine.anonymous <= mine.rss
    assert sample(2**22 + 1) is None


def test_the_three_stand_side_by_side_with_what_reading_layers_adds_in_the_compute_buffer() -> None:
    plan = _plan(
        Line("target", "compute", "device", 90.0, "formula"),
        Line("target", "extraction", "device", 10.0, "formula"),
        Line("target", "kv", "device", 7.0, "exact"),
    )
    account = Account(ENGINE, plan, (Sample(1.0, 500.0, 300.0, 170.0),))
    assert account.rows() == [
        ("target", "compute", 100.0, 100.0),
        ("target", "kv", 7.0, None),
        ("draft", "weights", None, 50.0),
    ]
    assert account.table()[1][-1] == ["total", "", "107.00", "150.00", "170.00"]
    assert str(account).splitlines()[-1].split() == ["total", "107.00", "150.00", "170.00"]
    assert account.residual == 20.0


def test_without_a_device_the_process_counts_by_its_own_pages_and_no_residual_is_made_up() -> None:
    account = Account(ENGINE, samples=(Sample(1.0, 500.0, 300.0),))
    assert account.process == 300.0
    assert account.residual is None
    assert account.as_dict()["planned"] is None


def test_growth_is_the_peak_over_the_first_sample() -> None:
    grown = growth([Sample(t, 0, 0, mib) for t, mib in enumerate((100.0, 140.0, 120.0))])
    assert grown is not None and (grown.grown, grown.last) == (40.0, 120.0)
    assert growth([]) is None


def test_a_device_that_stops_telling_is_not_mixed_with_pages_of_the_host() -> None:
    grown = growth([Sample(0, 0, 10.0, 900.0), Sample(1, 0, 11.0, None)])
    assert grown is not None and grown.first == 10.0


def test_watching_keeps_few_samples_and_always_the_highest() -> None:
    seen = iter([Sample(float(i), 0, 1000.0 if i == 777 else 1.0) for i in range(2000)])
    over = threading.Event()

    def look(_: int) -> Sample | None:
        found = next(seen, None)
        if found is None:
            over.set()
        return found

    watch = Watch(1, seconds=0, keep=64, look=look).start()
    assert over.wait(30)
    watch.stop()
    assert len(watch.samples) <= 66
    assert max(one.anonymous for one in watch.samples) == 1000.0
    assert [one.at for one in watch.samples] == sorted(one.at for one in watch.samples)


def _log(name: str) -> list[str]:
    return (LOGS / name).read_text().splitlines()


def test_a_residual_is_the_most_that_was_held_beyond_the_buffers() -> None:
    samples = tuple(Sample(float(at), 0, 0, mib) for at, mib in enumerate((160.0, 190.0, 170.0)))
    account = Account(ENGINE, samples=samples)
    assert account.residual == 40.0
    assert account.as_dict()["growth"] == {"first": 160.0, "peak": 190.0, "last": 170.0}


def test_growth_is_told_once_and_again_when_it_doubled() -> None:
    sizes = iter((100.0, 130.0, 170.0, 180.0, 260.0))
    watch = Watch(1, seconds=0, look=lambda _: None)
    told = []
    for at, mib in enumerate(sizes):
        watch._take(Sample(float(at), 0, mib))
        told.append(watch.growth_note())
    assert [note is not None for note in told] == [False, False, True, False, True]
    assert told[2] is not None and "grew by 70 MiB" in told[2]


def test_the_json_has_the_engines_buffers_and_the_three_side_by_side() -> None:
    data = Account(ENGINE, _plan(Line("target", "compute", "device", 90.0, "formula"))).as_dict()
    assert data["target"] == {"compute": 100.0} and data["draft"] == {"weights": 50.0}
    assert data["lines"][0] == {"context": "target", "kind": "compute", "planned": 90.0, "engine": 100.0}


OOM = "0.9 E alloc_buffer: allocating 65.00 MiB on device 0: cudaMalloc failed: out of memory"


def test_a_run_that_went_well_did_not_run_out() -> None:
    assert out_of_memory(_log("patched-dflash2.log")) is None


def test_running_out_while_loading_names_what_did_not_fit() -> None:
    log = _log("pristine-dflash2.log")
    drafter = next(i for i, line in enumerate(log) if "loading draft model" in line)
    found = out_of_memory([*log[: drafter + 1], "terminate: vector::_M_range_check: __n (which is 1)"])
    assert found is not None and found.phase == "load"
    assert "the drafter does not" in found.advice
    first = out_of_memory([OOM])
    assert first is not None and "target's weights" in first.advice


def test_running_out_at_the_first_request_is_told_from_loading_and_from_later() -> None:
    log = _log("pristine-dflash2.log")
    ready = next(i for i, line in enumerate(log) if "listening on" in line)
    launch = next(line for line in log if "processing task" in line)
    at_first = out_of_memory([*log[: ready + 1], launch, OOM])
    assert at_first is not None and at_first.phase == "first token"
    assert "-ub" in at_first.advice
    later = out_of_memory([*log, launch, launch, OOM])
    assert later is not None and later.phase.startswith("request ")


@pytest.mark.parametrize(
    "line",
    [
        "0.5 E drafter needs 23 MiB on CUDA0, 8 MiB free (210 MiB, the target takes 201 MiB of it)",
        "0.5 E error loading model: vector::_M_range_check: __n (which is 1) >= this->size() (which is 1)",
        "0.5 E error loading model: invalid vector subscript",
    ],
)
def test_words_that_mean_the_drafter_blame_the_drafter_even_before_anything_is_loaded(line: str) -> None:
    found = out_of_memory([line])
    assert found is not None and found.phase == "load"
    assert found.advice.startswith("the target fits, the drafter does not")


def test_caches_of_the_target_are_told_from_its_weights() -> None:
    log = _log("pristine-dflash2.log")
    caches = next(i for i, line in enumerate(log) if "KV buffer size" in line)
    found = out_of_memory([*log[:caches], "0.5 E llama_init: failed to allocate buffer for kv cache"])
    assert found is not None and found.advice.startswith("the caches do not fit")


def test_a_request_that_the_engine_answers_with_bad_alloc_ran_out_as_well() -> None:
    log = _log("pristine-dflash2.log")
    launch = next(line for line in log if "processing task" in line)
    found = out_of_memory(["I listening on x", launch, "E update_slots: decode() failed: std::bad_alloc"])
    assert found is not None and found.phase == "first token"


def test_a_residual_is_kept_by_device_driver_and_build_with_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCPP_CACHE", str(tmp_path))
    key = residuals.key_of("GPU-1", "580", "abc")
    assert residuals.recall(key) is None
    residuals.remember(key, 312.5, now=1000.0)
    known = residuals.recall(key, now=1000.0 + 3 * 86400)
    assert known is not None and (known.mib, known.when) == (312.5, "3 days ago")
    assert residuals.recall(residuals.key_of("GPU-1", "581", "abc")) is None


def test_a_damaged_file_of_residuals_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCPP_CACHE", str(tmp_path))
    residuals.remember("a", 1.0)
    (tmp_path / "state" / "memory" / "residuals.json").write_text("{")
    assert residuals.recall("a") is None
    residuals.remember("a", 2.0)
    assert residuals.recall("a") is not None


def test_the_engine_sees_the_larger_buffer_of_the_first_request() -> None:
    assert parse_log(_log("pristine-dflash2.log")).as_dict() == {
        "target": {"weights": 92.1, "kv": 90.0, "compute": 19.76, "output": 0.19},
        "draft": {"weights": 14.98, "kv": 6.0, "compute": 103.39, "output": 0.19},
    }
    assert parse_log(_log("patched-dflash2.log")).mib("draft", "compute") == 1.13


def test_a_target_that_does_not_fit_alone_is_not_said_to_fit() -> None:
    line = (
        "0.5 E drafter needs 23 MiB on CUDA0, 0 MiB free (60 MiB, the target alone takes 201 MiB): shorten -c"
    )
    found = out_of_memory([line])
    assert found is not None and found.phase == "load"
    assert found.advice.startswith("the target alone does not fit")
