"""Reading llama-server's memory out of its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflashcpp.memory.engine import EngineMemory, LogReader, Row, is_host, parse_log, with_props

LOGS = Path(__file__).parent / "memory_logs"


def _log(name: str) -> list[str]:
    return (LOGS / name).read_text().splitlines()


def test_a_target_alone_gives_its_four_buffers() -> None:
    assert parse_log(_log("pristine-target.log")).rows == (
        Row("target", "weights", "CPU_Mapped", 92.1),
        Row("target", "kv", "CPU", 90.0),
        Row("target", "compute", "CPU", 17.51),
        Row("target", "output", "CPU", 0.19),
    )


def test_what_follows_the_loading_of_the_draft_model_is_the_drafters() -> None:
    memory = parse_log(_log("pristine-draft-simple.log"))
    assert memory.as_dict() == {
        "target": {"weights": 92.1, "kv": 47.81, "compute": 14.42, "output": 0.38},
        "draft": {"weights": 92.1, "kv": 90.0, "compute": 15.51, "output": 0.38},
    }


def test_the_measuring_passes_of_fit_are_not_counted() -> None:
    real = _log("pristine-target.log")
    begin = next(i for i, line in enumerate(real) if "fitting params to device memory" in line)
    noise = [line.replace("17.51", "9999.00").replace(" I ", " D ") for line in real if "buffer size" in line]
    assert parse_log([*real[: begin + 1], *noise, *real[begin + 1 :]]) == parse_log(real)


def test_a_target_that_reserves_again_after_the_drafter_was_loaded_keeps_its_lines() -> None:
    log = [*_log("pristine-draft-simple.log"), *_reserve(1356, 21.5)]
    memory = parse_log(log)
    assert memory.mib("target", "compute") == 21.5
    assert memory.mib("draft", "compute") == 15.51


def test_a_drafter_that_samples_on_the_device_reserves_a_larger_graph() -> None:
    memory = parse_log([*_log("pristine-draft-simple.log"), *_reserve(1999, 31.0)])
    assert memory.mib("draft", "compute") == 31.0
    assert memory.mib("target", "compute") == 14.42


def test_sliding_and_full_caches_are_told_apart_and_several_devices_are_summed() -> None:
    log = [
        "0.1 I srv    load_model: loading model 'm.gguf'",
        "0.1 I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)",
        "0.1 I load_tensors:   CPU_Mapped model buffer size =   100.50 MiB",
        "0.1 I load_tensors:   CPU_Mapped model buffer size =    10.25 MiB",
        "0.1 I load_tensors:        CUDA0 model buffer size =  1000.00 MiB",
        "0.1 I llama_context: constructing llama_context",
        "0.1 I llama_context:  CUDA_Host  output buffer size =     0.77 MiB",
        "0.1 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 131072 cells",
        "0.1 I llama_kv_cache:      CUDA0 KV buffer size =  1664.00 MiB",
        "0.1 I llama_kv_cache_iswa: creating     SWA KV cache, size = 2560 cells",
        "0.1 I llama_kv_cache:      CUDA0 KV buffer size =    97.50 MiB",
        "0.1 I llama_memory_recurrent:      CUDA0 RS buffer size =    12.00 MiB",
        *_reserve(10, 273.52, device="CUDA0"),
        "0.1 I load_hparams: something nobody has seen before = 12 MiB",
    ]
    memory = parse_log(log)
    assert memory.mib(kind="weights", host=True) == 110.75
    assert memory.mib(host=False) == pytest.approx(1000 + 1664 + 97.5 + 12 + 273.52)
    assert {row.kind for row in memory.rows} == {"weights", "kv", "kv_swa", "recurrent", "compute", "output"}


def test_a_server_that_wakes_up_counts_its_model_once() -> None:
    log = _log("pristine-draft-simple.log")
    assert parse_log(log + log) == parse_log(log)


def test_the_reader_can_be_asked_at_any_moment() -> None:
    reader = LogReader()
    assert reader.memory().rows == ()
    for line in _log("pristine-target.log"):
        reader.feed(line)
        reader.memory()
    assert reader.memory().mib("target", "kv") == 90.0


def test_the_table_ends_with_a_sum_for_every_device() -> None:
    headers, rows = parse_log(_log("pristine-target.log")).table()
    assert headers[-1] == "MiB"
    assert rows[-2:] == [["total", "", "CPU_Mapped", "92.10"], ["total", "", "CPU", "107.70"]]


@pytest.mark.parametrize(
    ("name", "host"),
    [("CPU", True), ("CPU_REPACK", True), ("CUDA_Host", True), ("CUDA0", False), ("Vulkan1", False)],
)
def test_host_memory_is_known_by_its_name(name: str, host: bool) -> None:
    assert is_host(name) is host


def _reserve(nodes: int, mib: float, device: str = "CPU") -> list[str]:
    return [
        "0.9 I sched_reserve: reserving ...",
        f"0.9 I sched_reserve: {device:>10} compute buffer size = {mib:8.2f} MiB",
        f"0.9 I sched_reserve: graph: nodes = {nodes}, splits = 1, input objects = 4, input tensors = 8",
    ]


def _told(device: str, model: float, context: float, compute: float) -> dict[str, object]:
    sizes = {"model": model, "context": context, "compute": compute}
    return {"device": device} | {name: int(mib * 2**20) for name, mib in sizes.items()}


LOG = EngineMemory(
    (
        Row("target", "weights", "CPU_Mapped", 92.1),
        Row("target", "kv", "CPU", 60.0),
        Row("target", "kv_swa", "CPU", 30.0),
        Row("target", "compute", "CPU", 17.51),
        Row("target", "output", "CPU", 0.19),
        Row("draft", "compute", "CPU", 1.13),
    )
)


def test_a_patched_server_tells_sizes_to_the_byte_and_the_log_the_kinds_of_cache() -> None:
    told = {"target": [_told("Host", 92.125, 90.0, 19.7578125)], "draft": [_told("Host", 15, 6, 1.125)]}
    made = with_props(LOG, told)
    assert [(row.kind, row.mib) for row in made.rows if row.context == "target"] == [
        ("weights", 92.125), ("kv", 60.0), ("kv_swa", 30.0), ("compute", 19.7578), ("output", 0.19),
    ]  # fmt: skip
    assert made.as_dict()["draft"] == {"weights": 15.0, "kv": 6.0, "compute": 1.12}
    assert made.mib("target", host=False) == 0


def test_caches_that_grew_since_the_log_are_the_servers() -> None:
    made = with_props(LOG, {"target": [_told("CUDA0", 0, 64, 5), _told("Host", 92, 40, 5)], "draft": []})
    assert made.mib("target", "kv", host=False) == 64
    assert made.mib("target", "kv", host=True) == 40
    assert made.mib("target", "kv_swa") == 0
    assert made.mib("draft", "compute") == 1.13


@pytest.mark.parametrize("told", [None, {}, {"target": [{"device": "CPU"}]}, {"target": 3, "draft": None}])
def test_a_server_that_does_not_tell_leaves_the_log(told: dict[str, object] | None) -> None:
    assert with_props(LOG, told) == LOG
