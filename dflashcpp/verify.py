"""`verify`: is this GGUF the drafter that its source is? Settings, tensors, logits, drafted blocks.

Most wrong conversions still answer correctly, because the target checks every token; they are only
slow. So a conversion is proved against its source: every setting read from both and compared, every
tensor compared, and both run in the torch reference on the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.checkpoint import Checkpoint, open_checkpoint
from dflashcpp.drafter import Drafter, Rope
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, TensorType, read_header
from dflashcpp.metadata import same_value
from dflashcpp.progress import SILENT, Progress
from dflashcpp.verify_bounds import Limits, limits, outside, tensor_bound

if TYPE_CHECKING:
    from dflashcpp.reference.comparison import Numbers, TensorError
    from dflashcpp.reference.vocabulary import Vocabulary
    from dflashcpp.reference.weights import CheckpointWeights, GgufWeights

DEFAULT_BLOCKS = 16
_HEAD = "output.weight"

# What a checkpoint may lack because it is the target's; only with the target can it be checked.
_OF_THE_TARGET = ("embedding_scale", "sections", "vocab", "target_layers")


_GEOMETRY = (
    "version",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "conv_kernel",
    "conv_group",
    "selector_top_k",
    "draft_vocab",
)


@dataclass(frozen=True)
class VerifyResult:
    """What was compared and what came out; `numbers` is None where nothing could be run."""

    gguf: Path
    source: Path
    drafter: Drafter
    types: dict[str, int]  # stored type: number of tensors
    settings: int
    tensors: int
    worst: tuple[TensorError, ...]  # the worst tensor of each stored type
    numbers: Numbers | None
    allowed: Limits | None
    vocabulary: str
    seed: int
    problems: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """No setting differs; tensors and numbers are within the bounds of their types."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The JSON that `verify --json` prints."""
        numbers = self.numbers
        return {
            "gguf": str(self.gguf),
            "source": str(self.source),
            "version": self.drafter.version,
            "pass": self.passed,
            "kl_mean": numbers and numbers.kl_mean,
            "kl_max": numbers and numbers.kl_max,
            "top1": numbers and numbers.top1,
            "blocks_equal": numbers and numbers.blocks_equal,
            "blocks": numbers and numbers.blocks,
            "rows": numbers and numbers.rows,
            "hidden_error": numbers and numbers.hidden_error,
            "edge_error": numbers and numbers.edge_error,
            "limits": self.allowed and asdict(self.allowed),
            "settings": self.settings,
            "tensors": self.tensors,
            "types": self.types,
            "tensor_errors": [{**asdict(worst), "bound": tensor_bound(worst.type)} for worst in self.worst],
            "vocabulary": self.vocabulary,
            "seed": self.seed,
            "problems": list(self.problems),
            "unchecked": list(self.unchecked),
        }

    def text(self) -> str:
        """A few lines for a person."""
        verdict = "the drafter of its source" if self.passed else "NOT the drafter of its source"
        lines = [f"{self.gguf}: {verdict} ({self.source})", *self._checked()]
        lines += [f"  differs: {problem}" for problem in self.problems]
        lines += [f"  not checked: {what}" for what in self.unchecked]
        return "\n".join(lines)

    def _checked(self) -> list[str]:
        taps = [tap - 1 for tap in self.drafter.taps]
        lines = [
            f"settings: {self.settings} compared; outputs of target layers {taps}, mask token "
            f"{self.drafter.mask_token_id}, rope theta {self.drafter.rope.theta:g}, block of "
            f"{self.drafter.block_size}",
            f"tensors: {self.tensors} compared; largest error by type: "
            + ", ".join(f"{w.type} {w.error:.2g} (bound {tensor_bound(w.type):.2g})" for w in self.worst),
        ]
        if self.numbers is None or self.allowed is None:
            return [*lines, "logits: not run, the two do not have one geometry"]
        n, allowed = self.numbers, self.allowed
        return [
            *lines,
            f"logits of {n.blocks} blocks, {n.rows} rows: KL mean {n.kl_mean:.2g} "
            f"(limit {allowed.kl_mean:.2g}), largest {n.kl_max:.2g} ({allowed.kl_max:.2g}), "
            f"same top token {n.top1:.3f} ({allowed.top1:.3f})",
            f"drafted blocks equal: {n.blocks_equal:.3f} (limit {allowed.blocks_equal:.3f})",
            f"{self.vocabulary}; features: random, seed {self.seed}",
        ]


def verify(
    gguf: str | Path,
    source: str | Path,
    *,
    target: str | Path | None = None,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    blocks: int = DEFAULT_BLOCKS,
    seed: int = 0,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Compare a drafter's GGUF with the checkpoint it was made from.

    `source`: `.safetensors` file, folder or Hub id; `target`: the target's GGUF, whose embedding and
    head are then used (without it: seeded random ones), and which settles what only a target knows;
    `blocks`: how many random blocks are drafted; `config` and `overrides` as for `convert`.

    Raises DflashError when a side cannot be read, and when PyTorch is not installed. A difference is
    no error: it is in the result.
    """
    from dflashcpp.reference import require_torch
    from dflashcpp.sources import resolve_source

    require_torch()
    if blocks < 1:
        raise DflashError(f"--blocks {blocks}: at least one block must be drafted")
    header = read_header(gguf)
    place = resolve_source(source, progress)
    with open_checkpoint(place, config, overrides=overrides) as checkpoint:
        return _Verification(header, checkpoint, target, progress).run(blocks, seed)


@dataclass(frozen=True)
class _Run:
    numbers: Numbers
    allowed: Limits
    vocabulary: str


class _Verification:
    """One comparison: reads both sides, then settings, tensors, numbers."""

    def __init__(
        self, header: Header, checkpoint: Checkpoint, target: str | Path | None, progress: Progress
    ) -> None:
        from dflashcpp.reference.weights import CheckpointWeights, GgufWeights

        self.progress = progress
        self.header = header
        self.checkpoint = checkpoint
        self.mine = Drafter.from_gguf(header)
        self.source, self.unchecked = _expected(checkpoint.drafter, self.mine, target)
        self.target = None if target is None else read_header(target)
        self.head_of_target = self.mine.own_head and not (self.source.own_head or self.mine.own_embedding)
        if self.head_of_target:
            self.source = replace(self.source, own_head=True)
            if self.target is None:
                self.unchecked.append("output.weight: the target's head, stored anew (--target)")
        self.mine_weights: GgufWeights = GgufWeights(header)
        self.source_weights: CheckpointWeights = CheckpointWeights(checkpoint)

    def run(self, blocks: int, seed: int) -> VerifyResult:
        compared, problems = compare_settings(self.mine, self.source)
        differ = self._table()
        errors = [] if differ else self._tensors()
        problems += differ + [_too_far(error) for error in errors if error.error > tensor_bound(error.type)]
        run = None
        if not differ and _same_geometry(self.mine, self.source):
            run = self._run(blocks, seed, {error.name: error.error for error in errors})
        if run is not None:
            problems += outside(run.numbers, run.allowed)
        return VerifyResult(
            gguf=Path(self.header.source),
            source=self.checkpoint.path,
            drafter=self.mine,
            types=_types(self.header),
            settings=compared,
            tensors=len(errors),
            worst=_worst(errors),
            numbers=None if run is None else run.numbers,
            allowed=None if run is None else run.allowed,
            vocabulary=run.vocabulary if run else "no embedding and no head was needed",
            seed=seed,
            problems=tuple(problems),
            unchecked=tuple(self.unchecked),
        )

    def _table(self) -> list[str]:
        """Names and shapes: what one side has and the other has not."""
        wanted = {name: tuple(tensor.shape) for name, tensor in self.checkpoint.tensors.items()}
        found = {name: tuple(reversed(info.ne)) for name, info in self.header.tensors.items()}
        problems = [f"tensor {name} is missing from the GGUF" for name in wanted if name not in found]
        known = {*wanted, _HEAD} if self.head_of_target else set(wanted)
        problems += [f"tensor {name} is not in the source" for name in found if name not in known]
        return problems + [
            f"tensor {name} has shape {list(found[name])}, the source has {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ]

    def _tensors(self) -> list[TensorError]:
        from dflashcpp.reference.comparison import tensor_error

        names, errors = [name for name in self.header.tensors if name in self.checkpoint.tensors], []
        with self.progress.task("comparing tensors", len(names), "tensors") as task:
            for name in names:
                task.note(name)
                type_name = self.mine_weights.type_name(name)
                errors.append(tensor_error(self.mine_weights, self.source_weights, name, type_name))
                task.advance()
        if self.head_of_target and self.target is not None:
            errors.append(self._head_error(self.target))
        return errors

    def _head_error(self, target: Header) -> TensorError:
        """The stored head against the target's."""
        from dflashcpp.reference.comparison import tensor_error
        from dflashcpp.reference.weights import GgufWeights

        head = target.tensors.get(_HEAD, target.tensors["token_embd.weight"])
        theirs = GgufWeights(replace(target, tensors={_HEAD: head}))
        return tensor_error(self.mine_weights, theirs, _HEAD, self.mine_weights.type_name(_HEAD))

    def _run(self, blocks: int, seed: int, errors: Mapping[str, float]) -> _Run:
        """Both sides, and the source with random errors of the same size, on the same inputs."""
        from dflashcpp.reference.comparison import Inputs, compare, drafts, hidden_rows, scale_head
        from dflashcpp.reference.model import ReferenceDrafter
        from dflashcpp.reference.weights import NoisyWeights

        mine_words, source_words = self._vocabularies(seed)
        source = ReferenceDrafter(self.source, self.source_weights, source_words)
        sides = [source, ReferenceDrafter(self.mine, self.mine_weights, mine_words)]
        if any(errors.values()):
            noisy = NoisyWeights(self.source_weights, errors, seed)
            sides.append(ReferenceDrafter(self.source, noisy, source_words))
        inputs = Inputs.random(self.source, source_words.size, blocks, seed)
        rows = min(self.mine.block_size, self.source.block_size)
        hidden = []
        with self.progress.task(f"drafting {blocks} blocks", len(sides), "passes") as task:
            for side in sides:
                hidden.append(hidden_rows(side, inputs, rows))
                task.advance()
        scale_head(source, hidden[0])
        drafted = drafts(sides, hidden, inputs)
        numbers = [
            compare(side, source, inputs, draft, drafted[0])
            for side, draft in zip(sides[1:], drafted[1:], strict=True)
        ]
        return _Run(numbers[0], limits(numbers[1] if len(numbers) > 1 else None), source_words.origin)

    def _vocabularies(self, seed: int) -> tuple[Vocabulary, Vocabulary]:
        """Embedding and head of each side: the drafter's own where it has them, else shared."""
        from dflashcpp.reference.vocabulary import shared_vocabulary, with_own

        size = self.source.vocab or self.mine.vocab
        if size is None:
            raise DflashError(f"neither {self.header.source} nor the source says how large the vocabulary is")
        shared = shared_vocabulary(self.target, size, self.source.hidden, seed)
        if self.head_of_target:
            return shared, shared
        return with_own(shared, self.mine, self.mine_weights), with_own(
            shared, self.source, self.source_weights
        )


def _expected(source: Drafter, mine: Drafter, target: str | Path | None) -> tuple[Drafter, list[str]]:
    """The drafter the GGUF should be: the source's, completed by the target; what stays unchecked.

    Without a target the GGUF's own values stand in for what the checkpoint does not say.
    """
    if target is not None:
        from dflashcpp.target import complete, read_target

        return complete(source, read_target(target), str(target))[0], []
    unchecked = []
    values, rope = {}, source.rope
    for name in _OF_THE_TARGET:
        owner, other = (source.rope, mine.rope) if name == "sections" else (source, mine)
        ours, theirs = getattr(other, name), getattr(owner, name)
        if theirs is not None or ours is None:
            continue
        unchecked.append(f"{name} {_shown(ours)}: only the target says it (--target)")
        if name == "sections":
            rope = replace(rope, sections=ours)
        else:
            values[name] = ours
    return replace(source, rope=rope, **values), unchecked


def compare_settings(mine: Drafter, source: Drafter) -> tuple[int, list[str]]:
    """How many settings were compared, and a sentence for each that differs (GGUF, then source)."""
    pairs = [
        (entry.name, getattr(mine, entry.name), getattr(source, entry.name)) for entry in fields(Drafter)
    ]
    pairs = [pair for pair in pairs if pair[0] != "rope"]
    pairs += [
        (f"rope {entry.name}", getattr(mine.rope, entry.name), getattr(source.rope, entry.name))
        for entry in fields(Rope)
    ]
    different = [
        f"{name.replace('_', ' ')} is {_shown(ours)} in the GGUF, {_shown(theirs)} in the source"
        for name, ours, theirs in pairs
        if not same_value(theirs, ours)
    ]
    return len(pairs), different


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _same_geometry(mine: Drafter, source: Drafter) -> bool:
    """Whether both can run on the same inputs, whatever else differs."""
    same = all(getattr(mine, name) == getattr(source, name) for name in _GEOMETRY)
    return same and mine.rope.dims == source.rope.dims


def _types(header: Header) -> dict[str, int]:
    found: dict[str, int] = {}
    for info in header.tensors.values():
        name = TensorType(info.type).name
        found[name] = found.get(name, 0) + 1
    return found


def _worst(errors: list[TensorError]) -> tuple[TensorError, ...]:
    found: dict[str, TensorError] = {}
    for error in errors:
        if error.type not in found or error.error > found[error.type].error:
            found[error.type] = error
    return tuple(sorted(found.values(), key=lambda error: -error.error))


def _too_far(error: TensorError) -> str:
    return (
        f"tensor {error.name} ({error.type}) is off by {error.error:.3g} of its size; "
        f"{error.type} costs at most {tensor_bound(error.type):.3g}"
    )
