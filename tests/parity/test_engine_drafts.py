"""The real llama-server drafts what the reference drafts, on the very features it saw.

A token may differ only where the reference itself hardly prefers its own: the engine keeps the
target's head in F16 or Q8_0 and rounds what it multiplies with, the reference computes in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import LlamaServer, pairs
from dflashcpp.conversion import convert
from dflashcpp.drafter import Drafter
from dflashcpp.gguf_file import Kv, ValueType, read_header
from dflashcpp.llamacpp import Build
from dflashcpp.reference.model import ReferenceDrafter
from dflashcpp.reference.vocabulary import BorrowedVocabulary, with_own
from dflashcpp.reference.weights import GgufWeights
from tests.support.acceptance import CHECKPOINT, held_out
from tests.support.checkpoints import LLAMA3, SLIDING, YARN, t1, t1_v2, write_checkpoint, write_target
from tests.support.gguf_edit import rewrite
from tests.support.trace import Replayed, read_trace, replay

pytestmark = [pytest.mark.parity, pytest.mark.real, pytest.mark.slow]

MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"yarn": YARN, "llama3": LLAMA3, "linear": {"rope_type": "linear", "factor": 4.0}}

CASES: dict[str, dict[str, Any]] = {
    "v1": t1(),
    "v1, causal": t1(is_causal=True),
    "v1, windowed": t1(**SLIDING),
    "v1, one layer windowed": t1(**MIXED),
    **{f"v1, {name}": t1(rope_scaling=rope) for name, rope in ROPE.items()},
    "v2": t1_v2(),
    "v2, windowed": t1_v2(**SLIDING),
    "v2, multiplier and softcap": t1_v2(
        dflash_config={"output_multiplier": 0.5, "final_logit_softcapping": 4.0}
    ),
    "v2, lattice wider than a hidden row": t1_v2(dflash_config={"selector_top_k": 16}),
    "v2, kernel 3, groups of 32": t1_v2(dflash_config={"conv_kernel_size": 3, "conv_group_size": 32}),
}
# Which layers are causal, whatever the one flag of the file says.
PATTERNS: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "the full layer only": (t1(**MIXED), [False, True]),
    "one of two sliding layers": (t1(**SLIDING), [True, False]),
    "one of two full layers": (t1(), [False, True]),
    "all but one": (t1(**{**MIXED, "is_causal": True}), [True, False]),
    "one of two, v2": (t1_v2(**SLIDING), [False, True]),
}
# Logits; the candidates' scores spread by 0.3 (tiny) and 3 (real). Measured: 0.001, 0.13 and 0.3.
TINY_BOUND = 0.01
REAL_BOUNDS = {"BF16": 0.3, "Q4_K_M": 0.6}
PROMPT = [7, 300, 12, 45, 99] * 20


@dataclass(frozen=True)
class Served:
    """Files of a pair and the trace of what a server did with them."""

    target: Path
    gguf: Path
    trace: Path

    def replayed(self, drafter: Drafter | None = None) -> list[Replayed]:
        """Every drafted token against the reference (`drafter`: other settings than the file's)."""
        header = read_header(self.gguf)
        meant, weights = drafter or Drafter.from_gguf(header), GgufWeights(header)
        words = BorrowedVocabulary(GgufWeights(read_header(self.target)), "the target's")
        side = ReferenceDrafter(meant, weights, with_own(words, meant, weights))
        return [token for drafted in read_trace(self.trace) for token in replay(side, drafted)]


def serve(
    folder: Path,
    target: Path,
    gguf: Path,
    prompts: Sequence[str | Sequence[int]],
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> Served:
    """Greedy answers of 48 tokens to `prompts`, full blocks drafted, caches in F32."""
    trace = folder / "a trace"
    monkeypatch.setenv("DFLASHCPP_TRACE", str(trace))
    flags: dict[str, Any] = {"threads": 1, "ctx_size": 1024, "flash_attn": "off", "spec_draft_n_max": 7}
    flags["spec_draft_adaptive"] = False  # how much is drafted then depends on the machine
    caches = {"cache_type_k_draft": "f32", "cache_type_v_draft": "f32"}
    log = folder / "server.log"
    with LlamaServer(target, gguf, build=build, log=log, **flags, **caches) as server:
        for prompt in prompts:
            server.client().complete(prompt, n_predict=48, temperature=0.0, ignore_eos=True)
    return Served(target, gguf, trace)


def serve_tiny(folder: Path, config: dict[str, Any], build: Build, monkeypatch: pytest.MonkeyPatch) -> Served:
    source = write_checkpoint(folder / "source", config, dtype="F32")
    target = write_target(folder / "target.gguf")
    gguf = folder / "drafter.gguf"
    convert(source, target=target, type="F32", output=gguf)
    return serve(folder, target, gguf, [PROMPT], build, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_tiny_drafters_draft_as_the_reference(
    name: str, tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = serve_tiny(tmp_path, CASES[name], build_patched, monkeypatch).replayed()
    assert len(tokens) > 250
    assert {token.slot for token in tokens} == set(range(7))
    assert max(token.position for token in tokens) > 120
    assert max(token.off for token in tokens) < TINY_BOUND
    assert sum(token.same for token in tokens) > 0.98 * len(tokens)


def test_a_drafter_causal_only_where_it_slides_drafts_as_the_reference(
    tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = t1(**{**MIXED, "is_causal": ...})
    served = serve_tiny(tmp_path, config, build_patched, monkeypatch)
    assert Drafter.from_gguf(read_header(served.gguf)).causal == (True, False)
    tokens = served.replayed()
    assert max(token.off for token in tokens) < TINY_BOUND
    wrong = replace(Drafter.from_gguf(read_header(served.gguf)), causal=(False, False))
    assert max(token.off for token in served.replayed(wrong)) > 10 * TINY_BOUND


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_of_any_causality_draft_as_the_reference(
    name: str, tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pattern = PATTERNS[name]
    target = write_target(tmp_path / "target.gguf")
    plain = tmp_path / "drafter.gguf"
    source = write_checkpoint(tmp_path / "source", config, dtype="F32")
    convert(source, target=target, type="F32", output=plain)
    key = "dflash.attention.causal_pattern"
    gguf = rewrite(plain, {key: Kv.array(ValueType.BOOL, pattern)})
    tokens = serve(tmp_path, target, gguf, [PROMPT], build_patched, monkeypatch).replayed()
    assert max(token.off for token in tokens) < TINY_BOUND


@pytest.mark.parametrize("config", [t1(), t1_v2()], ids=["v1", "v2"])
def test_a_head_of_its_own_is_drafted_with(
    config: dict[str, Any], tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored head is another model's, so drafting with the target's would be seen."""
    target, other = write_target(tmp_path / "target.gguf"), write_target(tmp_path / "other.gguf", seed=2)
    source = write_checkpoint(tmp_path / "source", config, dtype="F32")
    gguf = convert(source, target=other, type="F32", head="F16", output=tmp_path / "drafter.gguf").file
    served = serve(tmp_path, target, gguf, [PROMPT], build_patched, monkeypatch)
    assert max(token.off for token in served.replayed()) < TINY_BOUND
    without = replace(Drafter.from_gguf(read_header(gguf)), own_head=False)
    assert max(token.off for token in served.replayed(without)) > 10 * TINY_BOUND


def test_a_reference_with_wrong_settings_would_be_seen(
    tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: other settings draft clearly different tokens."""
    served = serve_tiny(tmp_path, t1_v2(**SLIDING), build_patched, monkeypatch)
    right = Drafter.from_gguf(read_header(served.gguf))
    wrong = {
        "theta": replace(right, rope=replace(right.rope, theta=10000.0)),
        "window": replace(right, window=20),
        "mask": replace(right, mask_token_id=3),
        "causality": replace(right, causal=(True, True)),
    }
    for name, drafter in wrong.items():
        tokens = served.replayed(drafter)
        assert sum(token.off > 10 * TINY_BOUND for token in tokens) > 0.3 * len(tokens), name


@pytest.mark.parametrize("type", REAL_BOUNDS)
def test_the_real_pair_drafts_as_the_reference(
    type: str, tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gguf = pairs.ensure_target(pairs.load_pair()), tmp_path / "drafter.gguf"
    convert(CHECKPOINT, target=target, type=type, output=gguf)
    prompts = [
        f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        for kind in ("code", "explain")
        for request in held_out(kind, 1)
    ]
    tokens = serve(tmp_path, target, gguf, prompts, build_patched, monkeypatch).replayed()
    assert len(tokens) > 250
    assert max(token.off for token in tokens) < REAL_BOUNDS[type]
    assert sum(token.same for token in tokens) > 0.95 * len(tokens)
