"""One drafter, three witnesses: the default base, the base that had no DFlash, and the torch reference.

They get the same GGUF files and prompts. A token may differ only where the reference itself hardly prefers
its own: half a year lies between the arithmetic of the two engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.support.checkpoints import (
    LLAMA3,
    YARN,
    array_entry,
    edited,
    random_entries,
    t1,
    t1_v2,
    write_checkpoint,
    write_target,
)
from tests.support.gguf_faults import faulty
from tests.support.trace import Drafted, Replayed, read_trace, replay

pytestmark = [pytest.mark.parity, pytest.mark.real, pytest.mark.slow]

FIRST_SLIDES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 40,
}
SLIDING = {**FIRST_SLIDES, "layer_types": ["sliding_attention"] * 2, "is_causal": False}
TRANSFORMED = {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}

CASES: dict[str, dict[str, Any]] = {
    "v1": t1(),
    "v1, causal": t1(is_causal=True),
    "v1, windowed": t1(**SLIDING),
    "v1, causal where it slides": t1(**FIRST_SLIDES),
    "v1, YaRN": t1(rope_scaling=YARN),
    "v1, llama3": t1(rope_scaling=LLAMA3),
    "v1, multiplier and softcap": t1(dflash_config=TRANSFORMED),
    "v2": t1_v2(),
    "v2, windowed": t1_v2(**SLIDING),
    "v2, causal where it slides": t1_v2(**{**FIRST_SLIDES, "is_causal": ...}),
    "v2, multiplier and softcap": t1_v2(dflash_config=TRANSFORMED),
    "v2, YaRN": t1_v2(rope_scaling=YARN),
    "v2, top 4, groups of 32": t1_v2(dflash_config={"selector_top_k": 4, "conv_group_size": 32}),
    "v2, top 15, kernel 3": t1_v2(dflash_config={"selector_top_k": 15, "conv_kernel_size": 3}),
}
# name: config, tensors beside the usual ones, and keys that the converter does not write for this target
SPECIAL: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Kv]]] = {
    "v1, sinks and value scale": (
        t1(dflash_config={"attention_sink_bias": True, "attention_value_scale": 0.6}),
        ("sinks",),
        {},
    ),
    "v1, embedding and head of its own": (
        t1(dflash_config={"input_embedding_scale": 3.0}),
        ("own_embedding", "own_head"),
        {},
    ),
    "v1, 128 of 512 tokens": (t1(draft_vocab_size=128), ("own_head",), {}),
    "v1, M-RoPE of text": (
        t1(),
        (),
        {"dflash.rope.dimension_sections": Kv.array(ValueType.INT32, [32, 0, 0, 0])},
    ),
}
PROMPT = [7, 300, 12, 45, 99] * 12
N_DRAFT = 7
TINY_BOUND, REAL_BOUND = 0.01, 0.3  # logits


@dataclass(frozen=True)
class Witness:
    """What one engine drafted, step by step, and what it answered."""

    drafts: list[Drafted]
    texts: list[str]

    @property
    def steps(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(drafted.position, drafted.anchor, drafted.tokens) for drafted in self.drafts]


def ask(
    build: Build,
    target: Path,
    drafter: Path | None,
    prompts: Sequence[str | Sequence[int]],
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Witness:
    """Greedy answers of 40 tokens, with full drafts and the draft cache in F32."""
    monkeypatch.setenv("DFLASHCPP_TRACE", str(trace))
    flags: dict[str, Any] = {"threads": 1, "ctx_size": 1024, "flash_attn": "off"}
    if drafter:
        flags |= {
            "cache_type_k_draft": "f32",
            "cache_type_v_draft": "f32",
            "spec_draft_n_max": N_DRAFT,
            "spec_draft_adaptive": False,
        }
    with LlamaServer(target, drafter, build=build, log=trace.with_suffix(".log"), **flags) as server:
        answers = [
            server.client().complete(prompt, n_predict=40, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        ]
    drafts = list(read_trace(trace)) if drafter else []
    return Witness(drafts, [answer.text for answer in answers])


def reference(target: Path, gguf: Path) -> ReferenceDrafter:
    header = read_header(gguf)
    drafter, weights = Drafter.from_gguf(header), GgufWeights(header)
    words = BorrowedVocabulary(GgufWeights(read_header(target)), "the target's")
    return ReferenceDrafter(drafter, weights, with_own(words, drafter, weights))


def check(witness: Witness, side: ReferenceDrafter, bound: float) -> None:
    """Every token is the reference's own, or as good as that to it."""
    tokens: list[Replayed] = [token for drafted in witness.drafts for token in replay(side, drafted)]
    assert len(tokens) > 200
    assert max(token.off for token in tokens) < bound
    assert sum(token.same for token in tokens) > 0.97 * len(tokens)


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def tiny_text(tiny_target: Path, build_f449e05: Build, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the tiny target says without a drafter."""
    with pytest.MonkeyPatch.context() as patch:
        trace = tmp_path_factory.mktemp("alone") / "trace"
        return ask(build_f449e05, tiny_target, None, [PROMPT], trace, patch).texts


def tiny_drafter(folder: Path, target: Path, name: str) -> Path:
    """The random drafter of this name as GGUF."""
    config, features, keys = SPECIAL.get(name) or (CASES[name], (), {})
    entries = random_entries(config, *features, dtype="F32")
    if "draft_vocab_size" in config:
        entries["d2t"] = array_entry(3 * np.arange(config["draft_vocab_size"]), "I64")
    source = write_checkpoint(folder / "source", config, entries=entries)
    gguf = convert(source, target=target, type="F32", output=folder / "converted.gguf").file
    return faulty(gguf, folder / "drafter.gguf", keys) if keys else gguf


@pytest.mark.parametrize("name", [*CASES, *SPECIAL])
def test_tiny_drafters_draft_the_same_everywhere(
    name: str,
    tmp_path: Path,
    tiny_target: Path,
    tiny_text: list[str],
    build_patched: Build,
    build_f449e05: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gguf = tiny_drafter(tmp_path, tiny_target, name)
    old, new = (
        ask(build, tiny_target, gguf, [PROMPT], tmp_path / build.base, monkeypatch)
        for build in (build_f449e05, build_patched)
    )
    assert old.texts == new.texts == tiny_text
    check(old, reference(tiny_target, gguf), TINY_BOUND)
    assert old.steps == new.steps


def test_a_candidate_row_longer_than_the_hidden_size_is_no_limit(
    tmp_path: Path, tiny_target: Path, build_f449e05: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top 16 makes rows of 272 numbers for a hidden size of 256."""
    gguf = tmp_path / "drafter.gguf"
    config = edited(t1_v2(), dflash_config={"selector_top_k": 16})
    source = write_checkpoint(tmp_path / "source", config, dtype="F32")
    convert(source, target=tiny_target, type="F32", output=gguf)
    witness = ask(build_f449e05, tiny_target, gguf, [PROMPT], tmp_path / "trace", monkeypatch)
    check(witness, reference(tiny_target, gguf), TINY_BOUND)


def test_the_real_pair_drafts_the_same_everywhere(
    tmp_path: Path, build_patched: Build, build_f449e05: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gguf = pairs.ensure_target(pairs.load_pair()), tmp_path / "drafter.gguf"
    convert(CHECKPOINT, target=target, type="BF16", output=gguf)
    prompts = [
        f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        for kind in ("code", "explain")
        for request in held_out(kind, 1)
    ]
    old, new = (
        ask(build, target, gguf, prompts, tmp_path / build.base, monkeypatch)
        for build in (build_f449e05, build_patched)
    )
    alone = ask(build_f449e05, target, None, prompts, tmp_path / "alone", monkeypatch)
    assert old.texts == alone.texts
    check(old, reference(target, gguf), REAL_BOUND)
    assert new.texts == old.texts
    assert old.steps == new.steps
