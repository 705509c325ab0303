"""The same drafter twice, from a GGUF and from its source: how far apart are tensors, rows, drafts.

Inputs are random but shaped like the real thing: taps whose size grows with the layer and that have
a few very large channels, contexts that cross the edge of the window, positions far into the text.
Taps are made by layer number, so that a drafter that reads other layers gets other features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from dflashcpp.drafter import Drafter
from dflashcpp.reference.model import Draft, ReferenceDrafter
from dflashcpp.reference.selector import edges
from dflashcpp.reference.vocabulary import RandomVocabulary
from dflashcpp.reference.weights import Weights

_NEAR, _FAR = 16, 14  # context keys just before the block, and anywhere before it
_OUTLIERS, _OUTLIER_SIZE = 3, 15.0  # channels of a layer that stand out, and by how much
LOGIT_SPREAD = 3.0  # standard deviation of the logits that a random head is scaled to


@dataclass(frozen=True)
class TensorError:
    """One tensor against its source: root mean square of the difference over that of the source."""

    name: str
    type: str
    error: float


@dataclass(frozen=True)
class Numbers:
    """How far two drafters are apart on the same inputs. KL(source || other), natural logarithm."""

    blocks: int
    rows: int
    kl_mean: float
    kl_max: float
    top1: float
    blocks_equal: float
    hidden_error: float
    edge_error: float | None


def tensor_error(mine: Weights, source: Weights, name: str, type_name: str) -> TensorError:
    """Compare one tensor of both sides, a slice at a time. Shapes must be equal."""
    difference = size = torch.zeros((), dtype=torch.float64)
    for start, stop in mine.slices(name):
        ours, theirs = mine.slice(name, start, stop).double(), source.slice(name, start, stop).double()
        difference = difference + (ours - theirs).square().sum()
        size = size + theirs.square().sum()
    if size == 0:
        return TensorError(name, type_name, float(difference.sqrt()))
    return TensorError(name, type_name, float((difference / size).sqrt()))


@dataclass(frozen=True)
class Inputs:
    """Contexts, anchors and positions of a batch of blocks; the same for both sides."""

    seed: int
    positions: torch.Tensor  # [blocks, context]
    starts: torch.Tensor  # [blocks]
    anchors: torch.Tensor  # [blocks]

    @classmethod
    def random(cls, drafter: Drafter, vocab: int, blocks: int, seed: int) -> Inputs:
        """Blocks that start anywhere in the trained context, past the window when there is one."""
        generator = torch.Generator().manual_seed(seed)
        first = (drafter.window or 0) + _context_rows(drafter)
        last = max(first + 1, drafter.context - drafter.block_size)
        starts = torch.randint(first, last, (blocks,), generator=generator)
        anchors = torch.randint(0, vocab, (blocks,), generator=generator)
        rows = [_context(drafter, int(start), generator) for start in starts]
        return cls(seed, torch.stack(rows), starts, anchors)

    def features(self, drafter: Drafter) -> torch.Tensor:
        """The taps a drafter reads: [blocks, context, taps * hidden]."""
        return torch.cat([self._layer(tap, drafter.hidden) for tap in drafter.taps], dim=-1)

    def _layer(self, layer: int, hidden: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer)
        values = torch.randn(*self.positions.shape, hidden, generator=generator) * (2 + layer)
        values[..., torch.randint(0, hidden, (_OUTLIERS,), generator=generator)] *= _OUTLIER_SIZE
        return values


def _context(drafter: Drafter, start: int, generator: torch.Generator) -> torch.Tensor:
    """Positions of context keys: the nearest, those at the window's edge for each row, others anywhere."""
    left = start - (drafter.window or start // 2) - 1
    edge = range(left, min(left + drafter.block_size + 2, start))
    taken = sorted({*range(start - _NEAR, start), *edge})
    wanted = _context_rows(drafter)
    free = torch.randperm(start, generator=generator)[: wanted + len(taken)].tolist()
    chosen = taken + [position for position in free if position not in taken]
    return torch.tensor(sorted(chosen[:wanted]))


def _context_rows(drafter: Drafter) -> int:
    return _NEAR + _FAR + drafter.block_size + 2


@torch.inference_mode()
def hidden_rows(side: ReferenceDrafter, inputs: Inputs, rows: int) -> torch.Tensor:
    """Final-normed rows of the drafted slots: [blocks, rows - 1, hidden]."""
    context = side.inject(inputs.features(side.drafter), inputs.positions)
    ids = torch.full((len(inputs.anchors), rows), side.drafter.mask_token_id)
    ids[:, 0] = inputs.anchors
    return side.block(context, ids, inputs.starts)[:, 1:]


def scale_head(side: ReferenceDrafter, hidden: torch.Tensor) -> None:
    """Give a random head the scale at which this side's logits have a spread of LOGIT_SPREAD."""
    if isinstance(side.vocabulary, RandomVocabulary):
        size = float(hidden.norm(dim=-1).mean()) * (side.drafter.logit_scale or 1.0)
        side.vocabulary.head_scale = LOGIT_SPREAD / size


@torch.inference_mode()
def drafts(sides: Sequence[ReferenceDrafter], hidden: Sequence[torch.Tensor], inputs: Inputs) -> list[Draft]:
    """What each side drafts, greedily, from its `hidden` rows."""
    words = sides[0].vocabulary
    if all(side.vocabulary is words for side in sides):  # a large head is gone through once
        raw = words.logits(torch.stack(tuple(hidden)))
        logits = [side.transformed(one) for side, one in zip(sides, raw, strict=True)]
    else:
        logits = [side.logits(rows) for side, rows in zip(sides, hidden, strict=True)]
    return [
        side.choose(rows, one, inputs.anchors) for side, rows, one in zip(sides, hidden, logits, strict=True)
    ]


@torch.inference_mode()
def compare(
    mine: ReferenceDrafter, source: ReferenceDrafter, inputs: Inputs, ours: Draft, theirs: Draft
) -> Numbers:
    """Logits, choices, drafted blocks and selector edges of two sides on the same inputs."""
    kl = torch.cat([_kl(one, other) for one, other in zip(ours.logits, theirs.logits, strict=True)])
    same = (ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean()
    equal = (ours.tokens == theirs.tokens).all(dim=-1).float().mean()
    return Numbers(
        blocks=len(inputs.anchors),
        rows=kl.numel(),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(same),
        blocks_equal=float(equal),
        hidden_error=_relative(ours.hidden, theirs.hidden),
        edge_error=_edge_error(mine, source, inputs, ours, theirs),
    )


def _kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL(theirs || ours) of each row, over the tokens that the source can draft at all."""
    expected, found = functional.log_softmax(theirs, -1), functional.log_softmax(ours, -1)
    terms = expected.exp() * (expected - found)
    return torch.where(expected.isneginf(), torch.zeros(()), terms).sum(-1).clamp_min(0).flatten()


def _edge_error(
    mine: ReferenceDrafter, source: ReferenceDrafter, inputs: Inputs, ours: Draft, theirs: Draft
) -> float | None:
    """The selector's edge scores along the source's path, for the source's candidates."""
    if ours.candidates is None or theirs.candidates is None:
        return None
    before = torch.cat((inputs.anchors[:, None], theirs.tokens[:, :-1]), dim=1).flatten()
    candidates = theirs.candidates.flatten(0, 1)
    scores = []
    for side, draft in ((mine, ours), (source, theirs)):
        gate = side.weights.linear("selector_hidden.weight", draft.hidden).flatten(0, 1)
        scores.append(edges(side.weights, gate, before, candidates))
    return _relative(*scores)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Root mean square of the difference over that of the source."""
    return float((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30))
