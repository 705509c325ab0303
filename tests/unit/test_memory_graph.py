"""The allocator on shapes, worked out by hand, and the sizes real engines gave for real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflashcpp.memory import planning, sources
from dflashcpp.memory.graph import Graph, beside_device_bytes, device_bytes, host_bytes
from dflashcpp.memory.settings import Settings
from tests.support.gguf_shapes import TARGETS, write_target

KIB = 256  # elements of f32 in a KiB


def _chain(graph: Graph, names: str) -> Graph:
    x = graph.new(KIB)
    for name in names.split():
        x = graph.op(name, x.ne, x)
    graph.expand(x)
    return graph


def test_operations_that_may_write_over_their_input_take_no_memory() -> None:
    assert host_bytes(_chain(Graph(), "scale rms_norm mul")) == 1024


def test_an_input_is_given_back_after_its_last_reader() -> None:
    assert host_bytes(_chain(Graph(), "mul_mat mul_mat mul_mat")) == 2048


def test_an_output_is_never_given_back_nor_written_over() -> None:
    graph = Graph()
    first = graph.op("mul_mat", (KIB,), graph.new(KIB))
    first.output = True
    graph.expand(graph.op("scale", (KIB,), first))
    assert host_bytes(graph) == 2048


def test_a_tensor_read_twice_is_not_written_over() -> None:
    graph = Graph()
    x = graph.op("mul_mat", (KIB,), graph.new(KIB))
    graph.expand(graph.op("add", (KIB,), graph.op("scale", (KIB,), x), x))
    assert host_bytes(graph) == 2048


def test_a_view_keeps_its_source_alive_and_costs_nothing() -> None:
    graph = Graph()
    x = graph.op("mul_mat", (KIB, 2), graph.new(8))
    half = graph.view(x, (KIB,))
    big = graph.op("mul_mat", (KIB, 2), graph.new(8))
    graph.expand(big)
    graph.expand(graph.op("mul_mat", (KIB,), half, big))
    assert host_bytes(graph) == 2048 + 2048 + 1024 + 64


def test_the_best_fitting_hole_is_taken() -> None:
    graph = Graph()
    start = graph.new(8)
    wide, narrow = graph.op("mul_mat", (2 * KIB,), start), graph.op("mul_mat", (KIB,), start)
    keep = graph.op("mul_mat", (KIB,), wide, narrow)
    graph.expand(keep)
    last = graph.op("mul_mat", (KIB,), keep)
    graph.expand(graph.op("mul_mat", (KIB,), last, keep))
    assert host_bytes(graph) == 32 + 4096


def test_weights_and_caches_are_no_part_of_the_buffer() -> None:
    graph = Graph()
    x = graph.op("mul_mat", (KIB,), graph.weight(4096, 4096), graph.new(KIB))
    graph.expand(graph.view(graph.weight(KIB), (KIB,), None, x))
    assert host_bytes(graph) == 2048


def test_with_a_device_the_host_keeps_inputs_and_the_lookup_of_embeddings() -> None:
    graph = Graph()
    rows = graph.op("get_rows", (KIB, 4), graph.weight(KIB, 100, host=True), graph.new(8))
    graph.expand(graph.op("mul_mat", (KIB, 8), graph.weight(KIB, KIB), rows))
    assert device_bytes(graph) == 128 + 4096 + 8192
    assert beside_device_bytes(graph) == 32 + 4096


# What llama-server (commit 0c1e570, CPU) told for these targets: -c 4096 -ub 512 -np 1, -c 8192 -ub 64 -np 4.
ENGINE = {
    "llama-3.1-8b": (120.01, 14.75),
    "mistral-small-24b": (234.01, 29.00),
    "ministral-8b": (120.01, 14.75),
    "qwen3-8b": (108.01, 13.25),
    "qwen3-4b": (84.01, 10.25),
    "qwen3-30b-a3b": (92.01, 11.25),
    "qwen3.5-27b": (136.02, 35.44),
    "qwen3.5-35b-a3b": (76.02, 23.63),
    "gemma-3-12b": (126.02, 15.47),
    "gemma-4-31b": (179.02, 22.10),
    "gemma-4-26b-a4b": (101.52, 12.41),
    "muse-glimmer-30b": (162.52, 20.00),
    "gpt-oss-20b": (97.14, 11.83),
    "nemotron-nano-9b": (147.79, 38.69),
    "nemotron-3-30b-a3b": (81.01, 17.30),
}


@pytest.mark.parametrize("name", ENGINE)
def test_the_compute_buffer_of_a_known_architecture_is_the_engines(name: str, tmp_path: Path) -> None:
    model = sources.from_gguf(write_target(tmp_path / "target.gguf", TARGETS[name]))
    assert model.known
    wide = Settings(context=4096, on_device=False)
    small = Settings(context=8192, ubatch=64, parallel=4, on_device=False)
    for settings, told in zip((wide, small), ENGINE[name], strict=True):
        lines = planning.make_lines(model, None, settings)
        compute = next(line for line in lines if line.kind == "compute")
        assert compute.mib == pytest.approx(told, abs=0.006)
