"""Measures what the bounds of `dflashcpp verify` are made from (dflashcpp/verify_bounds.py, docs/verify.md).

    python benchmarks/verify_bounds.py            # errors of every type on five distributions
    python benchmarks/verify_bounds.py --drafter  # the small real drafter at every recipe, three seeds

The first table: root mean square error over that of the numbers, 256 rows of 1024, scale 0.02. The
second: what quantising did beside what random errors of the same size did, the ratio `verify` bounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflashcpp import pairs
from dflashcpp.cli._output import Output
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import TensorType
from dflashcpp.quantize import encode, load_libggml
from dflashcpp.verify import verify
from dflashcpp.verify_bounds import TENSOR_BOUNDS

RECIPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0", "Q3_K_M", "Q2_K")


def distributions() -> dict[str, np.ndarray]:
    """Numbers as weights may be spread: [256, 1024] each."""
    generator = np.random.default_rng(0)
    shape = (256, 1024)
    outliers = generator.standard_normal(shape)
    outliers[:, generator.integers(0, shape[1], 5)] *= 15
    found = {
        "normal": generator.standard_normal(shape),
        "Laplace": generator.laplace(size=shape),
        "t, 4": generator.standard_t(4, size=shape),
        "t, 3": generator.standard_t(3, size=shape),
        "outlier columns": outliers,
    }
    return {name: (0.02 * values).astype(np.float32) for name, values in found.items()}


def type_errors() -> Iterator[list[str]]:
    """Type, its error on each distribution, 1.25 times the worst, the bound in use."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    library = load_libggml()
    for name, bound in TENSOR_BOUNDS.items():
        kind, errors = TensorType[name], []
        try:
            for values in distributions().values():
                raw = np.ascontiguousarray(encode(kind, values, library)).view(np.uint8)
                back = dequantize(raw.reshape(len(values), -1), GGMLQuantizationType(kind))
                errors.append(float(np.sqrt(np.square(values - back).sum() / np.square(values).sum())))
        except (DflashError, NotImplementedError, ValueError, KeyError):
            continue  # needs an importance matrix, or gguf cannot read it: estimated
        yield [name, *(f"{error:.5f}" for error in errors), f"{1.25 * max(errors):.4f}", f"{bound:.4f}"]


def drafter_errors(target: Path, folder: Path, seeds: int) -> Iterator[list[str]]:
    """Recipe, seed and numbers; "of random": the number over what random errors of the same size did."""
    source = pairs.knowledge.folder("models") / "smollm2-135m-dflash2"
    for recipe in RECIPES:
        gguf = folder / f"{recipe}.gguf"
        convert(source, target=target, type=recipe, output=gguf)
        for seed in range(seeds):
            result = verify(gguf, source, target=target, seed=seed)
            n, allowed = result.numbers, result.allowed
            assert n is not None and allowed is not None
            yield [
                recipe,
                str(seed),
                f"{n.kl_mean:.4f}",
                f"{4 * n.kl_mean / allowed.kl_mean:.2f}",
                f"{n.kl_max:.3f}",
                f"{n.top1:.3f}",
                f"{n.blocks_equal:.2f}",
                f"{n.hidden_error:.4f}",
                f"{2 * n.hidden_error / allowed.hidden_error:.2f}",
                "yes" if result.passed else "NO",
            ]


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drafter", action="store_true", help="the small real drafter at every recipe")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (3)")
    arguments, out = parser.parse_args(), Output()
    if not arguments.drafter:
        out.table(["type", *distributions(), "1.25 x worst", "bound"], type_errors())
        return
    headers = ["recipe", "seed", "KL", "of random", "KL max", "top-1", "blocks", "rows", "of random", "pass"]
    with tempfile.TemporaryDirectory() as folder:
        target = pairs.ensure_target(pairs.load_pair())
        out.table(headers, drafter_errors(target, Path(folder), arguments.seeds))


if __name__ == "__main__":
    main()
