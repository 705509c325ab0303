"""A llama-server compiled with the address and undefined sanitizers serves conversations without a report.

Compiling it takes minutes: `make test-deep`.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.draft_files import bf16_target
from dflashcpp import llamacpp
from dflashcpp.client import Client
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import toolchain
from dflashcpp.pairs import ensure_drafter, ensure_target, load_pair
from dflashcpp.progress import SILENT
from dflashcpp.server import LlamaServer
from tests.support.acceptance import held_out
from tests.support.checkpoints import SLIDING, t1, t1_v2, write_checkpoint, write_target
from tests.support.deep_builds import DeepBuild, deep_build
from tests.support.sanitized import complaints, options, sanitizers_in, watched

pytestmark = [pytest.mark.deep, pytest.mark.real, pytest.mark.slow]

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
FIXED: dict[str, Any] = {"spec_draft_n_max": 4, "spec_draft_adaptive": False}
ADAPTIVE: dict[str, Any] = {"spec_draft_n_max": 6, "spec_draft_adaptive": True}
SAMPLING: dict[str, Any] = {"spec_draft_sampling": "probabilistic"}


@pytest.fixture(scope="module", params=["0c1e570", "f449e05"])
def build(request: pytest.FixtureRequest) -> DeepBuild:
    """A base with our patches and both sanitizers, compiled in the cache."""
    return deep_build(request.param, "sanitized", ["llama-server"])


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    """Target and drafter of the small real pair."""
    target = ensure_target(load_pair())
    return target, ensure_drafter(load_pair(), target=target)


# -- the check can fail


def code_of(server: Path) -> dict[str, Path]:
    """The files that hold the code of a llama-server; the program itself may only call a library."""
    libraries = {path.name: path.resolve() for path in server.parent.glob("lib*.so")}
    return libraries if "libllama-server-impl.so" in libraries else {**libraries, server.name: server}


def test_all_of_the_program_is_compiled_with_both_sanitizers(
    build: DeepBuild, build_patched: llamacpp.Build
) -> None:
    plain = code_of(build_patched.binary("llama-server"))
    checked = code_of(build.program("llama-server"))
    assert {"libllama.so", "libllama-common.so", "libggml-base.so", "libggml-cpu.so"} < checked.keys()
    assert {name: sanitizers_in(path) for name, path in plain.items()} == {name: set() for name in plain}
    both = {"address", "undefined"}
    assert {name: sanitizers_in(path) for name, path in checked.items()} == dict.fromkeys(checked, both)


FAULTS = {
    "bounds": "int main(int n, char **) { int * a = new int[4]; n = a[n + 4]; delete[] a; return n * 0; }",
    "overflow": "int main(int n, char **) { int a = 2147483647; a += n; return a * 0; }",
    "leak": "int * a; int main(int n, char **) { a = new int[n]; a = nullptr; return 0; }",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, tmp_path: Path) -> None:
    source, program = tmp_path / "fault.cpp", tmp_path / "fault"
    source.write_text(FAULTS[fault], encoding="ascii")
    flags = ["-O0", "-fsanitize=address,undefined", "-o", str(program), str(source)]
    subprocess.run([toolchain.compilers()[1].path, *flags], check=True)
    ran = subprocess.run([program], env=options(), capture_output=True, text=True)
    assert ran.returncode != 0
    assert complaints(ran.stdout + ran.stderr)


# -- conversations


def chat_prompt(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def converse(client: Client, requests_: list[str], tokens: int = 20, **sampling: Any) -> int:
    """A conversation, each turn on the prompt of the turns before; how many tokens were drafted for it."""
    messages: list[dict[str, str]] = []
    drafted = 0
    for text in requests_:
        messages.append({"role": "user", "content": text})
        answer = client.chat(messages, max_tokens=tokens, **sampling)
        assert answer.timings is not None
        drafted += answer.timings.drafted or 0
        messages.append({"role": "assistant", "content": answer.text})
    return drafted


def patient(server: LlamaServer) -> Client:
    """A client that waits for a token as long as a sanitized server may take on a busy machine."""
    return server.client(first_token_timeout=1800.0, idle_timeout=900.0)


def slot(server: LlamaServer, action: str) -> None:
    """Save, restore or erase slot 0."""
    url = f"{server.url}/slots/0?action={action}"
    answer = requests.post(url, json={"filename": "slot.bin"}, timeout=600)
    assert answer.status_code == 200, answer.text


def to_the_end(client: Client, prompt: list[int], context: int, **sampling: Any) -> None:
    """An answer that ends where the context does."""
    answer = client.complete(prompt, n_predict=-1, ignore_eos=True, **sampling)
    assert answer.timings is not None
    assert len(prompt) + answer.timings.predicted_n == context


def test_one_slot_with_a_fixed_length(build: DeepBuild, pair: tuple[Path, Path], tmp_path: Path) -> None:
    turns = held_out("code", 3)
    with watched(build, *pair, tmp_path, parallel=1, ctx_size=256, **FIXED, **SAMPLING) as server:
        client = patient(server)
        assert converse(client, turns, **GREEDY) > 20
        slot(server, "save")
        assert converse(client, held_out("explain", 2), **SAMPLED) > 10
        slot(server, "restore")
        assert converse(client, turns, **SAMPLED, top_k=20, repeat_penalty=1.1) > 20
        slot(server, "erase")
        prompt = (client.tokenize(chat_prompt(turns[0])) * 20)[:236]
        to_the_end(client, prompt, 256, **GREEDY)
        to_the_end(client, prompt[:226], 256, **SAMPLED)


def test_one_slot_with_adaptive_length_and_context_shift(
    build: DeepBuild, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"parallel": 1, "ctx_size": 256, "context_shift": True}
    with watched(build, *pair, tmp_path, **flags, **ADAPTIVE, **SAMPLING) as server:
        client = patient(server)
        for sampling in (GREEDY, SAMPLED):
            converse(client, held_out("list", 2), **sampling)
            answer = client.complete(
                chat_prompt(held_out("code", 1)[0]), n_predict=260, ignore_eos=True, **sampling
            )
            assert answer.timings is not None and answer.timings.predicted_n == 260


GRAMMAR = 'root ::= "{" [a-z ]{4,12} "}"'


@pytest.mark.parametrize(
    ("unified", "length"),
    [(True, FIXED), (False, ADAPTIVE)],
    ids=["one cache, fixed", "a cache each, adaptive"],
)
def test_four_slots_at_once(
    unified: bool, length: dict[str, Any], build: DeepBuild, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"parallel": 4, "ctx_size": 2048, "kv_unified": unified}
    kinds = [GREEDY, SAMPLED, {**SAMPLED, "grammar": GRAMMAR}, {**GREEDY, "logit_bias": [[28, 1.0]]}]
    with (
        watched(build, *pair, tmp_path, **flags, **length, **SAMPLING) as server,
        ThreadPoolExecutor(4) as workers,
    ):
        client = patient(server)
        turns = [held_out(kind, 2) for kind in ("code", "explain", "list", "rewrite")]
        drafted = list(workers.map(lambda at: converse(client, turns[at], **kinds[at]), range(4)))
        assert length is ADAPTIVE or min(drafted) > 0
        with client.chat(turns[0][0], stream=True, max_tokens=200) as leaving:
            next(iter(leaving))
        assert converse(client, turns[1], **SAMPLED) >= 0
        body = {"prompt": chat_prompt(turns[2][0]), "n_predict": 12, "n_cmpl": 3, **SAMPLED}
        copies = requests.post(f"{server.url}/completion", json=body, timeout=1800)
        assert copies.status_code == 200 and len(copies.json()) == 3


# -- other drafters and targets, on the default base


@pytest.fixture(scope="module")
def default_build() -> DeepBuild:
    return deep_build("0c1e570", "sanitized", ["llama-server"])


def test_a_target_in_bf16(
    default_build: DeepBuild, build_patched: llamacpp.Build, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target = bf16_target(pair[0], build_patched, SILENT)
    with watched(default_build, target, pair[1], tmp_path, parallel=1, ctx_size=512, **FIXED) as server:
        assert converse(patient(server), held_out("code", 2), **GREEDY) > 20


MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
TWO_SLOTS: dict[str, Any] = {"threads": 2, "parallel": 2, "ctx_size": 1024, "kv_unified": False}
TINY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v1": (t1(), {}),
    "v1, one layer windowed, a cache of 256": (t1(**MIXED), {"spec_draft_ctx_size": 256}),
    "v2, windowed": (t1_v2(**SLIDING), {"context_shift": True}),
    "v2, eager": (t1_v2(), {"spec_draft_inject": "eager"}),
}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_pair(name: str, default_build: DeepBuild, tmp_path: Path) -> None:
    config, flags = TINY[name]
    target = write_target(tmp_path / "target.gguf")
    source = write_checkpoint(tmp_path / "source", config, dtype="F32")
    drafter = convert(source, target=target, type="BF16", output=tmp_path / "drafter.gguf").file
    prompt = [7 * n % 500 for n in range(300)]
    with watched(
        default_build,
        target,
        drafter,
        tmp_path,
        parallel=2,
        ctx_size=1024,
        kv_unified=False,
        **FIXED,
        **flags,
    ) as server:
        client = patient(server)
        for sampling in (GREEDY, SAMPLED):
            client.complete(prompt, n_predict=240, ignore_eos=True, **sampling)
            slot(server, "save")
            client.complete(prompt[:100] + prompt[150:], n_predict=20, ignore_eos=True, **sampling)
            slot(server, "restore")
            client.complete(prompt, n_predict=20, ignore_eos=True, id_slot=0, **sampling)
