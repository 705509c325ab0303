"""Converting a large DFlash-2 checkpoint: `dflashcpp convert` beside llama.cpp's two steps, in one run.

A checkpoint with the shapes of Muse-Glimmer-30B-DFlash2 (random bf16 weights, 5.5 GB) is made once. Then

  ours     dflashcpp convert CHECKPOINT -q TYPE                          (one pass, no file in between)
  theirs   convert_hf_to_gguf.py --outtype bf16, then llama-quantize     (pristine build, same threads)

are timed with the checkpoint in the page cache, and the outputs compared tensor by tensor.

  python benchmarks/convert.py --llama-cpp DIR --python PYTHON-WITH-TORCH --work DIR

DIR is a pristine llama.cpp tree of our base with a build in build/bin; PYTHON needs torch and
transformers. About 15 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES = ("muse", "small")
# llama.cpp recognises a tokenizer by what it makes of a test text; ours is put together from a GGUF
CONVERTER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
import convert_hf_to_gguf
sys.argv[:] = ["convert_hf_to_gguf.py", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""


@dataclass(frozen=True)
class Run:
    """One measured command: seconds, peak resident MiB, CPU seconds, bytes it left on disk."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    written: int


def measure(name: str, command: list[str | Path], output: Path, **environment: str) -> Run:
    """Run a command to its end; its peak is the kernel's own (ru_maxrss of that process)."""
    output.unlink(missing_ok=True)
    began = time.monotonic()
    log = output.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=file, stderr=file, env={**os.environ, **environment}
        )
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not output.is_file():
        sys.exit(f"{name} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return Run(name, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output.stat().st_size)


def warm(path: Path) -> None:
    """Have the file in the page cache, for every contender alike."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def checkpoint(folder: Path, shape: str) -> Path:
    """The checkpoint and two forms of its target: a GGUF header for us, a folder for llama.cpp."""
    from tests.support.checkpoints import MUSE, edited, write_checkpoint, write_target

    small = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 50000}
    config = MUSE if shape == "muse" else edited(MUSE, **small, dflash_config={"mask_token_id": 49999})
    if not (folder / "done").is_file():
        write_checkpoint(folder, config)
        write_target(
            folder / "target.gguf",
            arch="muse-glimmer",
            hidden=config["hidden_size"],
            layers=config["num_target_layers"],
            vocab=config["vocab_size"],
            tensors=False,
        )
        (folder / "done").touch()
    return folder


def target_folder(folder: Path, vocabulary: Path, size: int) -> Path:
    """A target as llama.cpp's converter wants it: a config and the tokenizer of `vocabulary` (a GGUF)."""
    from dflashcpp.gguf_file import read_header
    from tests.support.bpe import Bpe

    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    Bpe(read_header(vocabulary))._tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def same_tensors(ours: Path, theirs: Path) -> int:
    """How many tensors have the same type and bytes in both; all of them, or the program ends."""
    from dflashcpp.gguf_file import read_header

    one, two = read_header(ours), read_header(theirs)
    if set(one.tensors) != set(two.tensors):
        sys.exit(f"different tensors: {set(one.tensors) ^ set(two.tensors)}")
    with ours.open("rb") as left, theirs.open("rb") as right:
        for name, info in one.tensors.items():
            other = two.tensors[name]
            left.seek(one.data_start + info.offset)
            right.seek(two.data_start + other.offset)
            if info.type != other.type or left.read(info.nbytes) != right.read(other.nbytes):
                sys.exit(f"{name} differs")
    return len(one.tensors)


def main() -> None:
    arguments = parse()
    work: Path = arguments.work
    source = checkpoint(work / f"checkpoint-{arguments.shape}", arguments.shape)
    threads = str(arguments.threads)
    weights = source / "model.safetensors"
    ours, middle, theirs = work / "ours.gguf", work / "theirs-bf16.gguf", work / "theirs.gguf"

    warm(weights)
    runs = [
        measure(
            "dflashcpp convert",
            [
                *(sys.executable, "-m", "dflashcpp", "convert", source, "--target", source / "target.gguf"),
                *("-q", arguments.type, "-o", ours, "--threads", threads, "--json"),
            ],
            ours,
            PYTHONPATH=str(ROOT),
        )
    ]
    if arguments.llama_cpp:
        runs += two_steps(arguments, source, middle, theirs)
    report(arguments, runs, same_tensors(ours, theirs) if arguments.llama_cpp else 0)
    for path in (ours, middle, theirs):
        if not arguments.keep:
            path.unlink(missing_ok=True)


def two_steps(arguments: argparse.Namespace, source: Path, middle: Path, theirs: Path) -> list[Run]:
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    target = target_folder(arguments.work / "target", arguments.vocabulary, size)
    converter = arguments.work / "converter.py"
    converter.write_text(CONVERTER)
    warm(source / "model.safetensors")
    first = measure(
        "convert_hf_to_gguf.py",
        [
            *(arguments.python, converter, arguments.llama_cpp, source, "--outtype", "bf16"),
            *("--outfile", middle, "--target-model-dir", target),
        ],
        middle,
    )
    tool = arguments.llama_cpp / "build" / "bin" / "llama-quantize"
    second = measure("llama-quantize", [tool, middle, theirs, arguments.type, str(arguments.threads)], theirs)
    return [first, second]


def report(arguments: argparse.Namespace, runs: list[Run], same: int) -> None:
    ours, theirs = runs[0], runs[1:]
    total = sum(run.seconds for run in theirs)
    result = {
        "runs": [asdict(run) for run in runs],
        "ratio": round(ours.seconds / total, 3) if theirs else None,
        "same_tensors": same,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "command": " ".join(["python", *sys.argv]),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'':24}{'seconds':>9}{'CPU s':>9}{'peak MiB':>10}{'written MiB':>13}")
    for run in runs:
        print(
            f"{run.name:24}{run.seconds:9.1f}{run.cpu_seconds:9.1f}{run.peak_mib:10.0f}"
            f"{run.written / 2**20:13.0f}"
        )
    if theirs:
        print(f"\nours / theirs: {ours.seconds / total:.2f} of the wall time ({total:.1f} s)")
        print(
            f"{same} tensors of the same type and bytes; no file in between "
            f"(theirs: {theirs[0].written / 2**20:.0f} MiB)"
        )
    print(f"cores {result['cores']}, load {result['load_before']:.1f}; again with: {result['command']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and outputs")
    parser.add_argument(
        "--llama-cpp", type=Path, help="pristine llama.cpp tree with build/bin; left out: ours only"
    )
    parser.add_argument("--python", default=sys.executable, help="Python with torch and transformers")
    parser.add_argument(
        "--vocabulary", type=Path, help="any GGUF with a byte-level BPE tokenizer, for llama.cpp"
    )
    parser.add_argument("--shape", choices=SHAPES, default="muse")
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", action="store_true", help="leave the outputs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.llama_cpp and not arguments.vocabulary:
        parser.error("--llama-cpp needs --vocabulary")
    if shutil.disk_usage(arguments.work if arguments.work.is_dir() else Path()).free < 16 << 30:
        parser.error("about 15 GB of disk are needed")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
