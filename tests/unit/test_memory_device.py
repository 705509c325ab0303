"""How much memory a device has, as nvidia-smi tells it, with what others use and the driver keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflashcpp import llamacpp
from dflashcpp.errors import DflashError
from dflashcpp.memory import device, plan, residuals
from dflashcpp.memory.account import Sample, Watch, growth, sample
from tests.support.fake_tools import python_program
from tests.support.sparse_models import TINY, write_target

CARD = "0, GPU-abc, NVIDIA RTX A4000, 580.65.06, 16376, 1024, 350"


def _smi(folder: Path, devices: str, apps: str = "", code: int = 0) -> None:
    """An nvidia-smi that answers the two questions."""
    shown = f"print({apps!r} if 'compute-apps' in ' '.join(sys.argv) else {devices!r})"
    python_program(folder, "nvidia-smi", f"import sys\n{shown}\nsys.exit({code})\n")


@pytest.fixture(autouse=True)
def only_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device, "_by_nvml", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_free_is_what_neither_others_nor_the_driver_have(only_smi: Path) -> None:
    _smi(only_smi, CARD)
    (gpu,) = device.gpus()
    assert (gpu.name, gpu.driver, gpu.free) == ("NVIDIA RTX A4000", "580.65.06", 16376 - 1024 - 350)
    assert gpu.room(residual=300).free == gpu.free - 300


def test_no_driver_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.gpus() == []


def test_figures_a_card_does_not_tell_count_as_nothing_but_the_total_is_needed(only_smi: Path) -> None:
    _smi(only_smi, "0, GPU-abc, Spark, 580, 122880, [N/A], [N/A]")
    assert device.gpus()[0].free == 122880
    _smi(only_smi, "0, GPU-abc, Spark, 580, [N/A], [N/A], [N/A]")
    with pytest.raises(DflashError, match="does not tell the memory of Spark"):
        device.gpus()


def test_a_failing_nvidia_smi_is_quoted_with_the_way_round(only_smi: Path) -> None:
    _smi(only_smi, "NVIDIA-SMI has failed because it couldn't communicate with the driver", code=9)
    with pytest.raises(DflashError, match="communicate with the driver") as caught:
        device.gpus()
    assert "--device-memory" in str(caught.value.hint)


def test_the_memory_of_a_process_on_the_device_is_its_own(only_smi: Path) -> None:
    mine = f"GPU-abc, {os.getpid()}, 8123\nGPU-abc, 999999, 50\nGPU-other, {os.getpid()}, 7"
    _smi(only_smi, CARD, mine)
    seen = sample(os.getpid())
    assert seen is not None and seen.device == 8123
    assert device.gpus()[0].of([4]) is None


def test_a_plan_reads_the_device_and_says_whether_it_fits(only_smi: Path) -> None:
    _smi(only_smi, CARD)
    made = plan("muse-glimmer-30b", flags=("-c", "131072"), with_savings=False)
    assert made.room is not None and made.room.free == 15002
    assert made.fits is True
    _smi(only_smi, CARD.replace("1024", "2500"))
    assert plan("muse-glimmer-30b", flags=("-c", "131072"), with_savings=False).fits is False


def test_the_host_counts_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    target = write_target(tmp_path / "t.gguf", TINY)
    made = plan(target=target, flags=("-c", "1024"), with_savings=False)
    assert made.place == "host" and {line.place for line in made.lines} == {"host"}
    assert made.room is not None and made.room.name == "system memory" and made.room.free > 0


def test_a_process_that_grows_on_the_device_is_seen_growing(only_smi: Path) -> None:
    counter = only_smi / "calls"
    python_program(
        only_smi,
        "nvidia-smi",
        f"import pathlib, sys\ncalls = pathlib.Path({str(counter)!r})\n"
        "if 'compute-apps' not in ' '.join(sys.argv):\n"
        f"    print({CARD!r})\n    sys.exit()\n"
        "seen = len(calls.read_text()) if calls.exists() else 0\n"
        "calls.write_text('x' * (seen + 1))\n"
        f"print('GPU-abc, {os.getpid()}, %d' % (8000 + 100 * seen))\n",
    )
    watch = Watch(os.getpid(), seconds=0.01).start()
    until = time.monotonic() + 60
    while len(watch.samples) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    watch.stop()
    grown = growth(watch.samples)
    assert grown is not None and grown.first == 8000 and grown.grown >= 200


@pytest.mark.parametrize("patched", [True, False])
def test_what_a_run_took_beyond_the_buffers_is_used_by_the_next_plan_with_its_age(
    patched: bool, only_smi: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _smi(only_smi, CARD)
    roots = {True: own_cache / "ours", False: own_cache / "pristine"}
    builds = {key: SimpleNamespace(root=root, backend="cuda") for key, root in roots.items()}
    mine = residuals.build_of(roots[patched] / "bin" / "llama-server")
    assert residuals.learn(None, mine) is None
    assert residuals.learn(-3.0, mine) is None
    residuals.learn(310.0, mine)
    monkeypatch.setattr(llamacpp, "find_build", lambda patched, **_: builds[patched])

    made = plan("muse-glimmer-30b", flags=("-c", "131072"), with_savings=False, patched=patched)
    assert made.room is not None and made.room.free == 15002 - 310
    assert "just now" in made.room.origin

    other = plan("muse-glimmer-30b", flags=("-c", "131072"), with_savings=False, patched=not patched)
    assert other.room is not None and other.room.free == 15002


def test_nothing_is_learned_from_the_sum_over_several_devices(only_smi: Path, own_cache: Path) -> None:
    second = CARD.replace("0, GPU-abc", "1, GPU-def")
    _smi(only_smi, f"{CARD}\n{second}")
    assert len(device.gpus()) == 2
    assert residuals.learn(310.0, "a build") is None


def test_a_device_that_stops_answering_for_a_while_does_not_end_the_watching() -> None:
    answers: list[object] = [DflashError("no answer"), sample(os.getpid()), DflashError("no answer"), None]

    def look(_pid: int) -> Sample | None:
        answer = answers.pop(0)
        if isinstance(answer, DflashError):
            raise answer
        return answer

    watch = Watch(os.getpid(), seconds=0.01, look=look).start()
    until = time.monotonic() + 30
    while answers and time.monotonic() < until:
        time.sleep(0.01)
    watch.stop()
    assert len(watch.samples) == 1 and not answers
