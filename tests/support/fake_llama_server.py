"""S1: a fake llama-server executable. Prints help, prints a recorded log, then does what the test says.

`make` writes a small program into a folder; its plan is JSON beside it:

    help          text of --help
    log           lines for stderr, printed at the start
    then          "serve", "hang", "exit N", "signal N"; what happens after the log
    health        statuses of /health, the last one stays
    slow_log      seconds between the log lines
    speculative   what /slots says; drafted: what timings say
    die_at        number of the generation request it dies at, "exit N" or "signal N" in `death`
    rests_after   from which start on an adaptive length has found that drafting does not pay
    alias         what it calls itself (left out: what it was told)
    refuse        {path: [status, text]}
    starts        a file: a line is added at each start, with the argv as JSON
    fail_starts   how many of the first starts exit with code 1
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-ub,   --ubatch-size N                  physical maximum batch size (default: 512)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, q8_0
-ctv,  --cache-type-v TYPE              KV cache data type for V
-sm,   --split-mode {none,layer,row,tensor}
                                        how to split the model across multiple GPUs, one of:
                                        - none: use one GPU only
-mg,   --main-gpu INDEX                 the GPU to use for the model
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-mu,   --model-url MODEL_URL            model download url (default: unused)
-hf,   -hfr, --hf-repo <user>/<model>[:quant]
                                        Hugging Face model repository
-v,    --verbose, --log-verbose         log everything
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold.
--spec-draft-type-k, -ctkd, --cache-type-k-draft TYPE
                                        KV cache data type for K for the draft model
--spec-draft-type-v, -ctvd, --cache-type-v-draft TYPE
                                        KV cache data type for V for the draft model


----- speculative params -----

--spec-draft-hf, -hfd, --hf-repo-draft <user>/<model>[:quant]
                                        Same as --hf-repo, but for the draft model
--spec-draft-n-max N                    number of tokens to draft for speculative decoding (default: 3)
                                        (env: LLAMA_ARG_SPEC_DRAFT_N_MAX)
--spec-draft-p-min, --draft-p-min P     minimum speculative decoding probability (greedy) (default: 0.00)
--spec-draft-ngl, -ngld, --gpu-layers-draft N
                                        max. number of draft model layers to store in VRAM
--spec-draft-model, -md, --model-draft FNAME
                                        draft model for speculative decoding (default: unused)
--spec-type none,draft-simple,draft-eagle3,draft-mtp,draft-dflash,ngram-mod
                                        comma-separated list of types of speculative decoding to use
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
                                        (env: LLAMA_ARG_DRAFT_MAX)


----- example-specific params -----

--context-shift, --no-context-shift     whether to use context shift on infinite text generation
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-mm,   --mmproj FILE                    path to a multimodal projector file.
-a,    --alias STRING                   set model name aliases, comma-separated (to be used by API)
--host HOST                             ip address to listen
--port PORT                             port to listen (default: 8080)
--api-key KEY                           API key to use for authentication
--api-key-file FNAME                    path to file containing API keys
--metrics                               enable prometheus compatible metrics endpoint (default: disabled)
--slots, --no-slots                     expose slots monitoring endpoint (default: enabled)
"""

# The same program half a year earlier: no DFlash, --draft-max still there.
OLD_HELP = (
    "\n".join(
        line
        for line in HELP.replace(",draft-dflash,ngram-mod", "").splitlines()
        if not line.startswith("--draft, ") and "spec-ngram-mod-n-max" not in line
    )
    + "\n--draft, --draft-max N                  number of tokens to draft for speculative decoding (default: 16)\n"  # noqa: E501
)

# A fork with names of its own and no --metrics.
FORK_HELP = (
    "\n".join(
        line
        for line in HELP.replace("--spec-draft-n-max N ", "--spec-dflash-max N  ").splitlines()
        if "--metrics" not in line
    )
    + "\n"
)


def make(folder: Path, name: str = "llama-server", **plan: Any) -> Path:
    """Write the program; returns its path. `folder` may have spaces in its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"help": HELP, "then": "serve", **plan}))
    program = folder / name
    root = Path(__file__).parents[2]
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH={_quoted(root)} exec {_quoted(sys.executable)} {_quoted(__file__)} "
        f'{_quoted(folder / f"{name}.json")} "$@"\n'
    )
    program.chmod(0o755)
    return program


def starts(plan_file: Path) -> list[list[str]]:
    """The argvs it was started with, so far."""
    return [json.loads(line) for line in plan_file.read_text().splitlines()] if plan_file.exists() else []


def _quoted(path: Any) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"


def _value(argv: list[str], name: str, default: str = "") -> str:
    return argv[argv.index(name) + 1] if name in argv else default


def _end(how: str) -> None:
    word, number = how.split()
    if word == "signal":
        os.kill(os.getpid(), int(number))
        time.sleep(10)
    os._exit(int(number))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(argv: list[str]) -> None:
    """What the program does."""
    plan = json.loads(Path(argv[0]).read_text())
    arguments = argv[1:]
    if "--help" in arguments:
        sys.stdout.write(plan["help"])
        return
    number = 1
    if plan.get("starts"):
        number = len(starts(Path(plan["starts"]))) + 1
        with open(plan["starts"], "a") as file:
            file.write(json.dumps(arguments) + "\n")
    for line in plan.get("log", []):
        _say(line)
        time.sleep(plan.get("slow_log", 0))
    if number <= plan.get("fail_starts", 0):
        _end("exit 1")
    then = plan["then"]
    if then == "hang":
        time.sleep(3600)
    elif then != "serve":
        _end(then)
    else:
        _serve(plan, arguments, rests=number > plan.get("rests_after", 10**9))


def _serve(plan: dict[str, Any], arguments: list[str], rests: bool) -> None:
    from tests.support.fake_http import TIMINGS, FakeServer, Script, completion_steps

    drafted = plan.get("drafted", 8 if "--model-draft" in arguments else None)
    timings = {key: value for key, value in TIMINGS.items() if not key.startswith("draft")}
    if rests:
        timings |= {"draft_n": 0, "draft_n_accepted": 0, "draft_n_steps_per_len": [23]}
    elif drafted:
        timings |= {"draft_n": drafted, "draft_n_accepted": drafted // 2}
    speculative = plan.get("speculative", "--model-draft" in arguments)
    script = Script(
        health=plan.get("health", [200]),
        aliases=(plan.get("alias") or _value(arguments, "--alias")).split(","),
        slots=[{"id": 0, "speculative": speculative, "is_processing": False}],
        completion=lambda body: completion_steps(timings=timings),
        refuse={path: (status, text.encode()) for path, (status, text) in plan.get("refuse", {}).items()},
    )

    def generate(count: int) -> None:
        if count >= plan.get("die_at", 10**9):
            _say(plan.get("last_words", ""))
            _end(plan.get("death", "exit 1"))

    script.on_generate = generate
    server = FakeServer(script, int(_value(arguments, "--port", "0")))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.start()
    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
