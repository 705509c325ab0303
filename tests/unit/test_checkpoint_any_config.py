"""Whatever stands in a config.json: a drafter, or one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table
from dflashcpp.metadata import drafter_keys
from dflashcpp.target import Target, complete, read_target
from tests.support.checkpoints import random_entries, t1, t1_v2, write_checkpoint, write_target
from tests.unit.test_checkpoint_flavours import MUSE_ASSISTANT, speculators

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SLIDING = t1(rope_scaling=YARN, layer_types=["sliding_attention"] * 2, sliding_window=8)
CONFIGS = [t1(), t1_v2(), SLIDING, MUSE_ASSISTANT, speculators(t1()), speculators(t1_v2())]
EXTRA = ["architectures", "layer_types", "rope_parameters", "rope_scaling", "max_window_layers"]
EXTRA += ["speculators_config", "quantization_config", "num_hidden_layers", "rope_scaling.type", "rope_theta"]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places() -> list[str]:
    rows = table("convert/metadata.toml")
    return sorted({path for row in rows["setting"] + rows["shape"] for path in row["paths"]} | set(EXTRA))


def put(config: dict[str, Any], path: str, value: Any) -> None:
    *inner, last = path.split(".")
    for part in inner:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[last] = value


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Path], Target]]:
    folder = tmp_path_factory.mktemp("any")
    sources = []
    for number, config in enumerate(CONFIGS):
        two = "selector_rank" in config or "selector_rank" in config.get("dflash_config", {})
        entries = random_entries(t1_v2() if two else t1())
        sources.append(write_checkpoint(folder / str(number), config, entries=entries))
    yield sources, read_target(write_target(folder / "t.gguf", weights=False))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.integers(0, len(CONFIGS) - 1),
    edits=st.lists(st.tuples(st.sampled_from(places()), json_values), min_size=1, max_size=3),
)
def test_any_value_anywhere_gives_a_drafter_or_one_sentence(
    opened: tuple[list[Path], Target], which: int, edits: list[tuple[str, Any]]
) -> None:
    sources, target = opened
    config = copy.deepcopy(CONFIGS[which])
    for path, value in edits:
        put(config, path, value)
    (sources[which] / "config.json").write_text(json.dumps(config))
    try:
        with open_checkpoint(sources[which]) as checkpoint:
            drafter, _ = complete(checkpoint.drafter, target, "it")
            drafter_keys(drafter)
    except DflashError as error:
        assert error.message and "\n" not in error.message and len(error.message) < 2000
