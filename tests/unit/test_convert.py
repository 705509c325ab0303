"""A checkpoint and a target into one GGUF without libggml; bad input leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.cli.app import run
from dflashcpp.conversion import convert
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import read_header
from tests.support.checkpoints import (
    array_entry,
    random_entries,
    t1,
    t1_v2,
    tensor_count,
    to_bf16,
    write_checkpoint,
    write_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target dir") / "target.gguf", weights=False)


def converted(source: Path, target: Path, folder: Path, **options: Any) -> Any:
    from gguf import GGUFReader

    options = {"type": "F32", **options}
    result = convert(source, target=target, output=folder / "out.gguf", **options)
    return result, GGUFReader(result.file)


def field(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


@pytest.mark.parametrize("config", [t1(), t1_v2()], ids=["v1", "v2"])
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_every_weight_arrives_exactly(
    tmp_path: Path, target: Path, config: dict[str, Any], dtype: str
) -> None:
    from safetensors.numpy import load_file

    from dflashcpp.checkpoint import open_checkpoint

    source = write_checkpoint(tmp_path / "drafter", config, dtype=dtype)
    result, reader = converted(source, target, tmp_path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == result.tensors == tensor_count(result.drafter)
    weights = load_file(source / "model.safetensors")
    with open_checkpoint(source) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            expected = weights[tensor.source_name].astype(np.float32)
            assert (found[name].data.reshape(expected.shape) == expected).all(), name


@pytest.mark.parametrize("config", [t1(), t1_v2()], ids=["v1", "v2"])
def test_bf16_goes_to_f32_and_back_to_bf16_bit_by_bit(
    tmp_path: Path, target: Path, config: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "drafter", config)
    raw = {name: b"".join(entry.chunks()) for name, entry in random_entries(config).items()}
    _, reader = converted(source, target, tmp_path, type="bf16")
    wide = {tensor.name: tensor for tensor in converted(source, target, tmp_path)[1].tensors}
    for name, theirs in (
        ("blk.0.ffn_down.weight", "layers.0.mlp.down_proj.weight"),
        ("fc.weight", "fc.weight"),
    ):
        stored = next(tensor for tensor in reader.tensors if tensor.name == name)
        assert stored.tensor_type.name == "BF16"
        assert stored.data.tobytes() == raw[theirs]
        assert wide[name].data.tobytes() == (np.frombuffer(raw[theirs], "<u2").astype("<u4") << 16).tobytes()


def test_the_keys_are_those_llama_cpp_reads(tmp_path: Path, target: Path) -> None:
    config = t1_v2(layer_types=["sliding_attention"] * 2, sliding_window=64, use_sliding_window=True)
    _, reader = converted(write_checkpoint(tmp_path / "d", config), target, tmp_path)
    from gguf import GGUFValueType as V

    expected = {
        "general.architecture": (V.STRING, "dflash"),
        "general.file_type": (V.UINT32, 0),
        "dflash.block_count": (V.UINT32, 2),
        "dflash.context_length": (V.UINT32, 4096),
        "dflash.embedding_length": (V.UINT32, 256),
        "dflash.feed_forward_length": (V.UINT32, 512),
        "dflash.attention.head_count": (V.UINT32, 4),
        "dflash.attention.head_count_kv": (V.UINT32, 2),
        "dflash.attention.key_length": (V.UINT32, 64),
        "dflash.attention.value_length": (V.UINT32, 64),
        "dflash.attention.causal": (V.BOOL, False),
        "dflash.attention.sliding_window": (V.UINT32, 64),
        "dflash.attention.sliding_window_pattern": (V.BOOL, [True, True]),
        "dflash.rope.freq_base": (V.FLOAT32, 1e6),
        "dflash.block_size": (V.UINT32, 8),
        "dflash.target_layers": (V.INT32, [2, 4]),
        "dflash.conv_kernel_size": (V.UINT32, 2),
        "dflash.conv_group_size": (V.UINT32, 16),
        "dflash.selector_rank": (V.UINT32, 64),
        "dflash.selector_top_k": (V.UINT32, 8),
        "tokenizer.ggml.mask_token_id": (V.UINT32, 500),
    }
    for key, (kind, value) in expected.items():
        assert reader.get_field(key).types[-1] == kind, key
        assert field(reader, key) == value, key
    assert reader.get_field("dflash.attention.causal_pattern") is None


def test_mixed_causality_is_written_for_those_who_can_use_it(tmp_path: Path, target: Path) -> None:
    config = t1(
        layer_types=["sliding_attention", "full_attention"], sliding_window=8, use_sliding_window=True
    )
    result, reader = converted(write_checkpoint(tmp_path / "d", config), target, tmp_path)
    assert field(reader, "dflash.attention.causal") is False
    assert field(reader, "dflash.attention.causal_pattern") == [True, False]
    assert Drafter.from_gguf(read_header(result.file)).causal == (True, False)


def test_the_tokenizer_is_the_targets_byte_for_byte(tmp_path: Path, target: Path) -> None:
    result, _ = converted(write_checkpoint(tmp_path / "d"), target, tmp_path)
    ours, theirs = read_header(result.file), read_header(target)
    for key, value in theirs.kv.items():
        if key.startswith("tokenizer."):
            assert ours.kv[key].encoded() == value.encoded(), key


def test_the_token_list_is_padded_to_the_rows_of_the_embedding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", tokens=505, weights=False)
    result, reader = converted(write_checkpoint(tmp_path / "d", t1_v2()), target, tmp_path)
    tokens, kinds = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert (len(tokens), len(kinds), result.drafter.vocab) == (512, 512, 512)
    assert tokens[505:] == [f"[PAD{number}]" for number in range(505, 512)]
    assert set(kinds[505:]) == {5}


def test_the_file_says_where_it_comes_from(tmp_path: Path, target: Path) -> None:
    import hashlib

    snapshot = tmp_path / "models--z-lab--Tiny-DFlash" / "snapshots" / ("ab" * 20)
    source = write_checkpoint(snapshot)
    (source / "README.md").write_text(
        "---\nlicense: mit\nbase_model:\n- tiny/Target-1B\n---\n# card\nlicense: no\n"
    )
    _, reader = converted(source, target, tmp_path, type="BF16")
    expected = {
        "general.name": "Tiny-DFlash",
        "general.license": "mit",
        "general.source.repo_url": "https://huggingface.co/z-lab/Tiny-DFlash",
        "general.base_model.0.repo_url": "https://huggingface.co/tiny/Target-1B",
        "general.file_type": 32,
        "dflashcpp.recipe": "BF16",
        "dflashcpp.source.revision": "ab" * 20,
        "dflashcpp.source.sha256": hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest(),
    }
    assert {key: field(reader, key) for key in expected} == expected


def test_the_same_input_gives_the_same_bytes_for_any_number_of_threads(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1_v2())
    files = [
        convert(source, target=target, type="BF16", output=tmp_path / f"{threads}.gguf", threads=threads).file
        for threads in (1, 3)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_read_back_is_the_drafter_of_the_checkpoint(tmp_path: Path, target: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.3,
    }
    result, _ = converted(write_checkpoint(tmp_path / "d", t1_v2(rope_scaling=yarn)), target, tmp_path)
    back = Drafter.from_gguf(read_header(result.file))
    assert back.rope.attention_factor == pytest.approx(1.3)
    assert (back.taps, back.block_size, back.mask_token_id, back.vocab) == ((2, 4), 8, 500, 512)


def test_the_default_name_says_model_and_type(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_checkpoint(tmp_path / "Tiny 1B")
    assert convert(source, target=target, type="bf16").file == Path("dflash-Tiny-1B-BF16.gguf")


def test_json_is_one_object_with_the_promised_keys(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "d", t1_v2())
    out = tmp_path / "x.gguf"
    assert run(["convert", str(source), "--target", str(target), "-q", "bf16", "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tensors"] == {"count": 36, "types": {"BF16": 22, "F32": 14}}
    assert (said["version"], said["bytes"], said["file"]) == (2, out.stat().st_size, str(out))
    assert said["weights_mib"] > 0 and said["bits_per_weight"] > 16 and said["warnings"] == []


def test_a_dry_run_tells_the_size_and_writes_nothing(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1_v2())
    planned = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf", dry_run=True)
    assert not planned.file.exists()
    assert planned.bytes == convert(source, target=target, type="BF16", output=tmp_path / "x.gguf").bytes


# -- what must not work ---------------------------------------------------------------------------


def refused(source: Path, target: Path | None, folder: Path, *words: str, **options: Any) -> None:
    out = folder / "refused.gguf"
    options = {"type": "F32", **options}
    with pytest.raises(DflashError) as caught:
        convert(source, target=target, output=out, **options)
    text = f"{caught.value.message} {caught.value.hint or ''}"
    for word in words:
        assert word in text, text
    assert "\n" not in caught.value.message
    assert not out.exists() and not list(folder.glob(".dflashcpp*"))


def test_without_a_target_the_error_says_which_one_is_wanted(tmp_path: Path) -> None:
    refused(write_checkpoint(tmp_path / "d"), None, tmp_path, "--target", "6 layers", "hidden size 256")


def test_the_target_beside_the_checkpoint_is_found(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "d")
    write_target(source / "target.gguf", weights=False)
    assert convert(source, type="F32", output=tmp_path / "x.gguf").target.endswith("target.gguf")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden": 128}, ("hidden size 128", "256")),
        ({"layers": 3}, ("3 layers", "6")),
        ({"vocab": 640}, ("vocabulary of 640", "512")),
        ({"vocab": 400}, ("vocabulary of 400", "512")),
        ({"vocab": 512, "tokens": 520}, ("520 tokens",)),
    ],
)
def test_a_target_of_another_model_is_refused(
    tmp_path: Path, shape: dict[str, int], words: tuple[str, ...]
) -> None:
    target = write_target(tmp_path / "t.gguf", weights=False, **shape)  # type: ignore[arg-type]
    refused(write_checkpoint(tmp_path / "d"), target, tmp_path, *words)


def test_a_truncated_target_is_refused(tmp_path: Path, target: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(target.read_bytes()[:20_000])
    refused(write_checkpoint(tmp_path / "d"), broken, tmp_path, "broken.gguf", "cut off")


def test_a_drafter_is_no_target(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d")
    drafter = convert(source, target=target, type="F32", output=tmp_path / "a.gguf").file
    refused(source, drafter, tmp_path, "drafter, not a target")


def test_a_missing_target_and_a_missing_source_are_named(tmp_path: Path, target: Path) -> None:
    refused(write_checkpoint(tmp_path / "d"), tmp_path / "no.gguf", tmp_path, "no.gguf")
    refused(tmp_path / "nothing here", target, tmp_path, "nothing here")


def test_an_unknown_type_lists_the_known_ones(tmp_path: Path, target: Path) -> None:
    refused(write_checkpoint(tmp_path / "d"), target, tmp_path, "Q4_K_X", "Q4_K_M", type="Q4_K_X")


def test_an_output_folder_that_is_not_there_is_named(tmp_path: Path, target: Path) -> None:
    refused(write_checkpoint(tmp_path / "d"), target, tmp_path / "no" / "folder", "folder")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "norm.weight"])
def test_a_number_that_is_none_is_named_with_its_index(
    tmp_path: Path, target: Path, value: float, name: str
) -> None:
    shape = dict(random_entries(t1()))[name].shape
    values = np.ones(shape, np.float32)
    values[(..., 7)] = value
    entries = {**random_entries(t1()), name: array_entry(values)}
    source = write_checkpoint(tmp_path / "d", t1(), entries=entries)
    index = "[7]" if len(shape) == 1 else "[0, 7]"
    refused(source, target, tmp_path, f"{name}{index}")


def test_f16_overflow_is_named_and_bf16_takes_the_same_file(tmp_path: Path, target: Path) -> None:
    values = np.ones((256, 512), np.float32)
    values[3, 5] = 7e4
    entries = {**random_entries(t1()), "layers.0.mlp.down_proj.weight": array_entry(values)}
    source = write_checkpoint(tmp_path / "d", t1(), entries=entries)
    refused(source, target, tmp_path, "layers.0.mlp.down_proj.weight[3, 5]", "F16", type="F16")
    assert convert(source, target=target, type="BF16", output=tmp_path / "x.gguf").written


def test_f16_for_dflash2_must_be_forced(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1_v2())
    refused(source, target, tmp_path, "F16", "--force", type="f16")
    assert convert(source, target=target, type="f16", output=tmp_path / "x.gguf", force=True).written


def test_a_failed_conversion_leaves_the_old_file_alone(tmp_path: Path, target: Path) -> None:
    values = np.full((256,), np.nan, np.float32)
    source = write_checkpoint(
        tmp_path / "d", entries={**random_entries(t1()), "norm.weight": array_entry(values)}
    )
    old = tmp_path / "old.gguf"
    old.write_bytes(b"precious")
    with pytest.raises(DflashError):
        convert(source, target=target, type="F32", output=old)
    assert old.read_bytes() == b"precious" and not list(tmp_path.glob(".dflashcpp*"))


def test_a_source_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, target: Path) -> None:
    from dflashcpp import streaming
    from dflashcpp.checkpoint import Checkpoint

    source = write_checkpoint(tmp_path / "d")
    read = Checkpoint.read_rows

    def cut(self: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        os.truncate(source / "model.safetensors", 5000)
        return read(self, name, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming.Checkpoint, "read_rows", cut)
        refused(source, target, tmp_path, "changed while it was being read")


SCRIPT = """
import resource, signal, sys
from dflashcpp.cli.app import run
if sys.argv[1] != "0":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(run(sys.argv[2:]))
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d")
    out = tmp_path / "out"
    out.mkdir()
    command = ["convert", str(source), "--target", str(target), "-q", "F32", "-o", str(out / "x.gguf")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, "100000", *command], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, target: Path, number: signal.Signals) -> None:
    config = t1(intermediate_size=65536, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    source = write_checkpoint(tmp_path / "d", config)
    out = tmp_path / "out"
    out.mkdir()
    command = [
        "convert",
        str(source),
        "--target",
        str(target),
        "-q",
        "F32",
        "-o",
        str(out / "x.gguf"),
        "-t",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "0", *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(out.iterdir()):
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 1), errors
    assert "Traceback" not in errors
    assert list(out.iterdir()) == []


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, target: Path) -> None:
    """A 400 MiB checkpoint in a process that may not use that much."""
    config = t1(intermediate_size=131072, layer_types=["full_attention"] * 2)
    source = write_checkpoint(tmp_path / "d", config)
    assert (source / "model.safetensors").stat().st_size > 380 << 20
    # VmHWM begins anew with the program; ru_maxrss would begin with what the test run itself holds
    code = "import sys\nfrom dflashcpp.cli.app import run\nrc=run(sys.argv[1:])\n"
    code += "peak=[line for line in open('/proc/self/status') if line.startswith('VmHWM')][0]\n"
    code += "print(peak.split()[1])\nsys.exit(rc)"
    command = [
        "convert",
        str(source),
        "--target",
        str(target),
        "-q",
        "BF16",
        "-o",
        str(tmp_path / "x"),
        "-t",
        "2",
    ]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 250 * 1024  # KiB


def test_bf16_rounding_of_the_test_writer_is_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.0], np.float32)
    assert (to_bf16(values) == np.array([0x3F80, 0x3F80, 0x3F82, 0xC040], np.uint16)).all()
