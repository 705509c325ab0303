# ruff: noqa: E501  (recorded log lines)
from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflashcpp import knowledge
from dflashcpp.server.diagnose import diagnose, explain_exit

# (log text as llama-server prints it, exit state, kind, a word of the cause)
SAMPLES = [
    (
        'common/speculative.cpp:974: GGML_ASSERT(target_layer_ids_n > 0 && "DFlash model has no target_layer_ids") failed',
        -6,
        "pairing",
        "ordinary model",
    ),
    (
        'llama-graph.cpp:1384: GGML_ASSERT(t_layer_inp[il] != nullptr && "layer input tensor is null") failed',
        -6,
        "pairing",
        "layers",
    ),
    (
        "E llama_model_load: error loading model: missing tensor 'blk.0.attn_conv_base'",
        1,
        "build",
        "selector|DFlash-2",
    ),
    (
        "E llama_model_load: error loading model: missing tensor 'selector_hidden.weight'",
        1,
        "build",
        "selector_hidden",
    ),
    (
        "error loading model: done_getting_tensors: wrong number of tensors; expected 81, got 58",
        1,
        "build",
        "81",
    ),
    (
        'error while handling argument "--spec-type": unknown speculative type: draft-dflash',
        1,
        "build",
        "draft-dflash",
    ),
    (
        "E llama_model_load: error loading model: unknown model architecture: 'dflash-draft'",
        1,
        "build",
        "dflash-draft",
    ),
    ("DFlash2 model is missing conv/selector metadata", 1, "file", "metadata"),
    ("DFlash model requires 'target_layers' in GGUF metadata", 1, "file", "layers"),
    (
        "E llama_model_load: error loading model: tensor 'blk.16.ffn_down.weight' data is not within the file bounds, "
        "model is corrupted or incomplete",
        1,
        "file",
        "blk.16.ffn_down.weight",
    ),
    (
        "E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)",
        1,
        "file",
        "nope.gguf",
    ),
    ("E gguf_init_from_reader: invalid magic characters: 'NOPE', expected 'GGUF'", 1, "file", "NOPE"),
    ("E gguf_init_from_reader: failed to read key-value pairs", 1, "file", "header"),
    ("E gguf_init_from_reader: failed to read magic", 1, "file", "header"),
    (
        "ggml-backend-meta.cpp:542: GGML_ASSERT(src_ss[0].axis != GGML_BACKEND_SPLIT_AXIS_0) failed",
        -6,
        "flags",
        "-sm tensor",
    ),
    (
        'GGML_ASSERT((causal_attn || n_ubatch >= n_tokens_all) && "non-causal attention requires n_ubatch >= n_tokens") failed',
        -6,
        "flags",
        "ubatch",
    ),
    (
        "dflash.cpp:423: GGML_ASSERT(n_blocks > 0 && n_tokens % n_blocks == 0) failed",
        -6,
        "request",
        "different lengths",
    ),
    (
        "vector::_M_range_check: __n (which is 1) >= this->size() (which is 1)",
        1,
        "memory",
        "no device memory",
    ),
    ("error loading model: invalid vector subscript", 1, "memory", "no device memory"),
    (
        "E drafter needs 2070 MiB on CUDA0, 812 MiB free (15360 MiB, the target takes 14548 MiB of it): shorten",
        1,
        "memory",
        "the drafter needs 2070 MiB on CUDA0, 812 MiB are free",
    ),
    (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 462.67 MiB on device 0: cudaMalloc failed: out of memory",
        1,
        "memory",
        "462.67",
    ),
    (
        "E ggml_aligned_malloc: insufficient memory (attempted to allocate 219729.38 MB)",
        1,
        "memory",
        "219729.38",
    ),
    (
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        1,
        "memory",
        "memory",
    ),
    ("CUDA error: out of memory", -6, "memory", "memory"),
    (
        "W common_fit_params: failed to fit params to free device memory: was unable to fit model",
        1,
        "memory",
        "does not fit",
    ),
    ("E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18099", 1, "port", "18099"),
    ("error: invalid argument: --frobnicate", 1, "flags", "--frobnicate"),
    ('error while handling argument "-c": stoi', 1, "flags", "-c: stoi"),
    ("ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", 1, "build", "driver"),
    ("CUDA error: no kernel image is available for execution on the device", -6, "build", "no code"),
    (
        "llama-server: error while loading shared libraries: libllama.so: cannot open shared object file",
        127,
        "build",
        "libllama.so",
    ),
    ("DSpark draft has no confidence head: please set --spec-draft-p-min 0", 1, "flags", "confidence"),
    ("E srv load_model: failed to load draft model, 'd.gguf'", 1, "file", "d.gguf"),
    ("E srv load_model: failed to load model, 'm.gguf'", 1, "file", "m.gguf"),
    ("I srv  llama_server: starting server in router mode", None, "flags", "router mode"),
    ("llama_quantize: invalid ftype 'BOGUS'", 1, "flags", "BOGUS"),
    (
        "llama_model_quantize: failed to quantize: requantizing from type q4_1 is disabled",
        1,
        "file",
        "quantised already",
    ),
    (
        "llama_model_quantize: failed to quantize: failed to open x.gguf: No such file",
        1,
        "file",
        "failed to open x.gguf",
    ),
    (
        "I spec common_specu: - gpu_layers=-1, cache_k=q8_0, cache_v=q8_0, ctx_tgt=yes\n"
        "I slot print_timing: id  0 | task 4 | draft acceptance = 0.01333 (    2 accepted /   150 generated)",
        None,
        "drafting",
        "quantised",
    ),
    (
        "I spec common_specu: - gpu_layers=-1, cache_k=f16, cache_v=f16, ctx_tgt=yes\n"
        "I slot print_timing: id  0 | task 4 | draft acceptance = 0.00000 (    0 accepted /   150 generated)",
        None,
        "drafting",
        "no draft was accepted",
    ),
    ("", -9, "killed", "killed"),
    ("", -15, "killed", "SIGTERM"),
    ("operator(): operator(): cleaning up before exit...", 0, "killed", "told to end"),
    ("src/llama-kv-cache.cpp:77: GGML_ASSERT(n > 0) failed", -6, "unknown", "llama-kv-cache.cpp:77"),
    ("", -11, "unknown", "SIGSEGV"),
]


@pytest.mark.parametrize(("log", "code", "kind", "word"), SAMPLES)
def test_a_text_or_exit_state_has_its_cause_and_remedy(log: str, code: int, kind: str, word: str) -> None:
    found = diagnose(f"I srv load_model: loading model\n{log}\n", code)
    assert found is not None
    assert found.kind == kind
    assert re.search(word, found.cause)
    assert found.fix
    assert found.line in log


# The ends of llama-server and its relatives as measured: exit state, all that was printed, words of the answer.
MEASURED = [
    (0, "operator(): operator(): cleaning up before exit...", "good order"),
    (-15, "", "told to end (SIGTERM)"),
    (
        1,
        "E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)\n"
        "E llama_model_load: error loading model: llama_model_loader: failed to load model from nope.gguf\n"
        "E srv load_model: failed to load model, 'nope.gguf'\n"
        "E srv llama_server: exiting due to model loading error",
        "nope.gguf cannot be opened: No such file",
    ),
    (
        1,
        "E gguf_init_from_reader: invalid magic characters: 'NOPE', expected 'GGUF'\n"
        "E srv load_model: failed to load model, 'x.gguf'",
        "it begins with 'NOPE'",
    ),
    (1, "E gguf_init_from_reader: failed to read key-value pairs", "ends inside its header"),
    (1, "E gguf_init_from_reader: failed to read magic", "ends inside its header"),
    (
        1,
        "E llama_model_load: error loading model: tensor 'blk.16.ffn_down.weight' data is not within the file "
        "bounds, model is corrupted or incomplete",
        "cut off: blk.16.ffn_down.weight",
    ),
    (1, "E llama_model_load: error loading model: unknown model architecture: 'zzzzz'", "'zzzzz'"),
    (
        1,
        "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18099\n"
        "E srv llama_server: exiting due to HTTP server error",
        "port 18099 on 127.0.0.1 is taken",
    ),
    (1, "error: invalid argument: --frobnicate", "does not know --frobnicate"),
    (1, 'error while handling argument "-c": stoi', "refuses -c: stoi"),
    (1, 'error while handling argument "-c": expected value for argument', "refuses -c: expected value"),
    (
        1,
        'error while handling argument "--spec-type": unknown speculative type: draft-foo',
        "does not know --spec-type draft-foo",
    ),
    (
        1,
        'error while handling argument "--draft-max": the argument has been removed. use --spec-draft-n-max or '
        "--spec-ngram-mod-n-max",
        "use --spec-draft-n-max",
    ),
    (
        1,
        "W common_fit_params: failed to fit params to free device memory: was unable to fit model into system "
        "memory by reducing context, abort\n"
        "E ggml_aligned_malloc: insufficient memory (attempted to allocate 219729.38 MB)\n"
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n"
        "E srv load_model: failed to create_context with model 'm.gguf'",
        "no 219729.38 MB left",
    ),
    (
        1,
        "W operator(): failed to measure the memory of the extra model, fitting without it\n"
        "E srv load_model: failed to load draft model, 'nope.gguf'",
        "drafter nope.gguf could not be loaded",
    ),
    (
        -6,
        'common/speculative.cpp:974: GGML_ASSERT(target_layer_ids_n > 0 && "DFlash model has no '
        'target_layer_ids") failed',
        "ordinary model",
    ),
]


@pytest.mark.parametrize(("code", "log", "words"), MEASURED)
def test_every_measured_end_is_explained(tmp_path: Path, code: int, log: str, words: str) -> None:
    file = tmp_path / "server.log"
    file.write_text(f"0.00.001.964 I srv  llama_server: initializing ...\n{log}\n")
    error = explain_exit(file, code)
    assert words in error.message
    assert error.hint and str(file) in error.hint


def test_an_answer_without_accepted_drafts_does_not_explain_a_crash() -> None:
    found = diagnose("draft acceptance = 0.00000 (0 accepted / 15 generated)", -11)
    assert found is not None
    assert "SIGSEGV" in found.cause


def test_every_row_of_the_table_is_reached_by_a_sample() -> None:
    rows = knowledge.table("models/failures.toml")["failure"]
    shown = {diagnose(log, code).cause for log, code, _, _ in SAMPLES}  # type: ignore[union-attr]
    patterns = [re.escape(row["cause"]) for row in rows if not row.get("harmless")]
    patterns = [re.sub(r"\\\{\w+\\\}", ".*", pattern) for pattern in patterns]
    missed = [pattern for pattern in patterns if not any(re.fullmatch(pattern, cause) for cause in shown)]
    assert missed == []


@pytest.mark.parametrize(
    "line",
    [
        "E dflash requires ctx_other to be set (this warning is normal during memory fitting)",
        "W operator(): failed to measure the memory of the extra model, fitting without it",
    ],
)
def test_lines_that_only_look_like_errors_are_never_the_cause(line: str) -> None:
    assert diagnose(line, None) is None
    found = diagnose(f"{line}\nE srv start: couldn't bind HTTP server socket, hostname: h, port: 1\n", 1)
    assert found is not None
    assert found.kind == "port"


def test_the_root_is_named_and_not_what_followed_from_it() -> None:
    log = "E gguf_init_from_file: failed to open GGUF file 'x.gguf' (Permission denied)\nE srv load_model: failed to load model, 'x.gguf'"
    found = diagnose(log, 1)
    assert found is not None
    assert "Permission denied" in found.cause


def test_an_unknown_end_shows_the_last_line_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\nsomething nobody has seen\n\n")
    error = explain_exit(log, 3)
    assert "exit code 3" in error.message
    assert "something nobody has seen" in error.message
    assert str(log) in str(error.hint)


def test_a_server_that_said_nothing_is_told_so(tmp_path: Path) -> None:
    assert "it said nothing" in explain_exit(tmp_path / "none.log", 3).message


def test_a_log_that_is_no_text_is_read_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff\xfe\x00" * 100 + b"\nerror: invalid argument: --x\n")
    assert "--x" in explain_exit(log, 1).message


def test_memory_that_ran_out_is_told_with_the_phase(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("I srv llama_server: listening on http://x\nCUDA error: out of memory\n")
    assert "it ran out at: first token" in str(explain_exit(log, -6).hint)
    log.write_text("CUDA error: out of memory\n")
    assert "it ran out at: load" in str(explain_exit(log, 1).hint)
