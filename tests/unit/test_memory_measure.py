"""The engine's numbers before a start, and what becomes of the plan with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflashcpp.errors import DflashError
from dflashcpp.memory import plan, prepare
from dflashcpp.memory.lines import Line
from dflashcpp.memory.measure import Measured, disagreements, measure, parse, with_engine
from dflashcpp.memory.settings import Settings, from_flags, to_flags
from tests.support.fake_tools import python_program
from tests.support.sparse_models import TINY, write_target

MIB = 1 << 20


def _row(device: str, model: float, context: float, compute: float) -> dict[str, object]:
    sizes = {"model": model, "context": context, "compute": compute}
    return {"device": device, "description": "", "total": 0, "free": 0} | {
        name: int(size * MIB) for name, size in sizes.items()
    }


ANSWER = {
    "target": [_row("CUDA0", 1000, 64, 120), _row("Host", 10, 0, 5)],
    "draft": [_row("CUDA0", 50, 8, 13), _row("Host", 0, 0, 1)],
    "n_ctx": 4096,
}


def _engine(folder: Path, code: str) -> Path:
    return python_program(folder, "llama-fit-params", f"import sys\n{code}\n")


def test_the_engine_is_asked_with_the_servers_flags_and_answers_by_context_and_place(tmp_path: Path) -> None:
    seen = tmp_path / "argv"
    code = (
        f"print('noise'); print({json.dumps(json.dumps(ANSWER))})\n"
        f"open({str(seen)!r}, 'w').write(' '.join(sys.argv[1:]))"
    )
    told = measure(_engine(tmp_path, code), "t.gguf", "d.gguf", ["-c", "4096"])
    assert told is not None and told.context == 4096
    assert told.mib("target", "device", "compute") == 120
    assert told.mib("draft", "device", "context") == 8
    assert (
        tmp_path / "argv"
    ).read_text() == "-m t.gguf -c 4096 -fitp json -md d.gguf --spec-type draft-dflash"


def test_a_build_that_does_not_know_the_question_says_nothing(tmp_path: Path) -> None:
    code = "sys.stderr.write('error: invalid argument: -md'); sys.exit(1)"
    assert measure(_engine(tmp_path, code), "t.gguf", "d.gguf", []) is None
    assert measure(_engine(tmp_path, "print('Host 92 90 98 ')"), "t.gguf", None, []) is None


def test_a_build_that_fails_on_the_files_is_quoted(tmp_path: Path) -> None:
    code = "sys.stderr.write('0.1 E llama_model_load: error loading model: tensor x is missing'); sys.exit(1)"
    with pytest.raises(DflashError, match="tensor x is missing"):
        measure(_engine(tmp_path, code), "t.gguf", None, [])


@pytest.mark.parametrize("text", ["", "{", '{"target": [{"device": "CUDA0"}]}', "[1]"])
def test_half_an_answer_is_none(text: str) -> None:
    assert parse(text) is None


def _told() -> Measured:
    told = parse(json.dumps(ANSWER))
    assert told is not None
    return told


def test_engine_figures_replace_formulas_and_swallow_the_extraction() -> None:
    lines = [
        Line("target", "weights", "device", 1000.0, "exact"),
        Line("target", "compute", "device", 100.0, "formula", 0.02),
        Line("target", "extraction", "device", 19.0, "formula", 0.02),
        Line("draft", "compute", "device", 14.0, "formula", 0.03),
    ]
    found = with_engine(lines, _told())
    assert [(line.context, line.kind, line.mib, line.origin) for line in found] == [
        ("target", "weights", 1000.0, "exact"),
        ("target", "compute", 120.0, "engine"),
        ("draft", "compute", 13.0, "engine"),
    ]


def test_weights_that_differ_are_told_small_differences_are_not() -> None:
    lines = [
        Line("target", "weights", "device", 900.0, "exact"),
        Line("target", "kv", "device", 62.0, "exact"),
        Line("target", "weights", "host", 10.0, "exact"),
        Line("draft", "weights", "device", 50.0, "exact"),
        Line("draft", "kv_swa", "device", 8.0, "exact"),
    ]
    told = disagreements(lines, _told())
    assert len(told) == 1 and "target model on the device" in told[0]


def test_mapped_embeddings_the_engine_counts_twice_are_no_disagreement() -> None:
    lines = [
        Line("target", "weights", "device", 700.0, "exact"),
        Line("target", "kv", "device", 64.0, "exact"),
        Line("target", "weights", "host", 10.0, "exact"),
        Line("draft", "weights", "device", 50.0, "exact"),
        Line("draft", "kv", "device", 8.0, "exact"),
    ]
    assert disagreements(lines, _told(), twice=300.0) == []
    assert len(disagreements(lines, _told(), twice=200.0)) == 1


def test_why_the_engine_cannot_be_asked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_target(tmp_path / "t.gguf", TINY)
    monkeypatch.setattr(prepare, "_fit_params", lambda _: None)
    for options, reason in (
        ({}, "no patched build for the CPU"),
        ({"device_memory": 4000.0}, "no patched build for a GPU"),
        ({"patched": False}, "pristine"),
    ):
        with pytest.raises(DflashError, match=reason):
            plan(target=target, flags=("-c", "512"), engine=True, **options)
    with pytest.raises(DflashError, match=r"facts\) is not a GGUF file"):
        plan("muse-glimmer-30b", flags=("-c", "512"), engine=True)


def test_settings_survive_the_way_to_flags_and_back() -> None:
    settings = Settings(
        context=8192, ubatch=64, parallel=4, unified=True, gpu_layers=7, cache_k="q8_0", draft_max=9,
        flash=False, swa_full=True, draft_sampling=False, draft_ubatch=32,
    )  # fmt: skip
    assert from_flags(to_flags(settings)) == (settings, [])
    assert from_flags(to_flags(Settings())) == (Settings(), [])


def test_an_engine_that_fails_is_a_warning_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "t.gguf", TINY)
    broken = _engine(tmp_path, "sys.stderr.write('0.1 E it broke'); sys.exit(1)")
    monkeypatch.setattr(prepare, "_fit_params", lambda _: broken)
    made = plan(target=target, flags=("-c", "512"), with_savings=False)
    assert any("it broke" in text for text in made.warnings)
    assert all(line.origin != "engine" for line in made.lines)
    with pytest.raises(DflashError, match="it broke"):
        plan(target=target, flags=("-c", "512"), engine=True)


def test_the_plan_takes_the_engines_figures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "t.gguf", TINY)
    answer = json.dumps({"target": [_row("Host", 1, 1, 77)], "draft": [], "n_ctx": 512})
    monkeypatch.setattr(prepare, "_fit_params", lambda _: _engine(tmp_path, f"print({answer!r})"))
    made = plan(target=target, flags=("-c", "512"), with_savings=False)
    line = next(line for line in made.lines if line.kind == "compute")
    assert (line.mib, line.origin) == (77, "engine")
    assert any("target model on the host" in text for text in made.warnings)
