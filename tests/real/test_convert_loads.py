"""The converted shipped drafter drafts in a newer, prebuilt llama.cpp that is not ours (PyPI `xllamacpp`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflashcpp.conversion import convert
from dflashcpp.pairs import ensure_target, load_pair

pytestmark = [pytest.mark.real, pytest.mark.slow]

# In a process of its own: an engine that aborts must fail a test, not the test run.
SCRIPT = """
import json, sys
import xllamacpp as x
target, drafter, kind = sys.argv[1:4]
params = x.CommonParams()
params.model.path = target
params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
params.cpuparams.n_threads = 2
params.speculative.draft.mparams.path = drafter
params.speculative.draft.n_max = 4
params.speculative.types = [getattr(x.common_speculative_type, kind)]
server = x.Server(params)
answer = server.handle_completions({"prompt": "def fibonacci(n):", "n_predict": 40, "temperature": 0})
answer = answer if isinstance(answer, dict) else json.loads(answer)
print("TIMINGS " + json.dumps(answer["timings"]))
"""


@pytest.fixture(scope="module")
def kind() -> str:
    """The name of the draft-dflash enumerator."""
    xllamacpp = pytest.importorskip("xllamacpp")
    names = [name for name in dir(xllamacpp.common_speculative_type) if name.endswith("DFLASH")]
    assert names, "this xllamacpp does not know DFlash"
    return names[0]


@pytest.mark.parametrize("type_", ["Q4_K_M", "BF16"])
def test_the_shipped_drafter_is_accepted_by_xllamacpp(tmp_path: Path, kind: str, type_: str) -> None:
    pair = load_pair()
    target = ensure_target(pair)
    source = Path("models") / "smollm2-135m-dflash2" / "model.safetensors"
    drafter = convert(
        Path(__file__).parents[2] / source, target=target, type=type_, output=tmp_path / "d.gguf"
    ).file
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target), str(drafter), kind],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("TIMINGS ")]
    assert found, (done.stdout + done.stderr)[-3000:]
    timings = json.loads(found[0].removeprefix("TIMINGS "))
    assert timings["draft_n"] > 0 and timings["draft_n_accepted"] / timings["draft_n"] > 0.1
