"""What is wrong with this machine, or with a server: one check at a time, each with what to do.

A check that cannot be made says so (`skip`); it is never taken for a good one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflashcpp import paths
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp.client import Client
    from dflashcpp.stream import Answer

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
_BUILD_GIB = 2.0
_LONG = "Count in words, separated by commas: " + "one, two, three, four, five, six, seven, " * 12
_SHORT = "Say hello."
_CODE = "Write a Python function that adds two numbers."


@dataclass(frozen=True)
class Check:
    """One finding. `state`: ok, warn, fail, skip; `fix` is empty when there is nothing to do."""

    name: str
    state: str
    text: str
    fix: str = ""


def _checked(name: str, look: Callable[[], str | Check]) -> Check:
    """Run one check; an error of ours is a failed check, not the end of all."""
    try:
        found = look()
    except DflashError as error:
        return Check(name, FAIL, error.message, error.hint or "")
    return found if isinstance(found, Check) else Check(name, OK, found)


# -- this machine ----------------------------------------------------------------------------------


def machine(port: int = 8080) -> Iterator[Check]:
    """The checks of this machine, one by one."""
    looks: list[tuple[str, Callable[[], str | Check]]] = [
        ("python", _python),
        ("compiler", _compiler),
        ("cmake", _cmake),
        ("git", _git),
        ("gpu", _gpu),
        ("cuda", _cuda),
        ("disk", _disk),
        ("llama.cpp", _build),
        ("models", _models),
        ("port", lambda: _port(port)),
        ("servers", _servers),
        ("environment", _environment),
    ]
    for name, look in looks:
        yield _checked(name, look)


def _python() -> str:
    return f"Python {sys.version.split()[0]} at {sys.executable}"


def _compiler() -> str:
    from dflashcpp.llamacpp.toolchain import compilers

    return " and ".join(one.path for one in compilers())


def _cmake() -> str:
    from dflashcpp.llamacpp import toolchain

    return f"{toolchain.cmake()} and {toolchain.ninja()}"


def _git() -> str | Check:
    found = shutil.which("git")
    return found or Check("git", FAIL, "git is missing: the llama.cpp source cannot be proved", "install git")


def _gpu() -> str | Check:
    from dflashcpp.memory.device import gpus

    found = gpus()
    if not found:
        return Check("gpu", SKIP, "no NVIDIA GPU is seen (nvidia-smi, NVML)")
    return "; ".join(f"{gpu.name}, {gpu.free:.0f} MiB free, driver {gpu.driver}" for gpu in found)


def _cuda() -> str | Check:
    """The nvcc that would be used, and whether it compiles for the GPUs that are here."""
    from dflashcpp.llamacpp import gpu_tools

    compilers, gpus = gpu_tools.find_nvcc(), gpu_tools.gpus()
    if not compilers and not gpus:
        return Check("cuda", SKIP, "neither a GPU nor a CUDA compiler: builds are for the CPU")
    if not compilers:
        return Check(
            "cuda",
            WARN,
            "a GPU but no nvcc",
            "install the CUDA toolkit, then: dflashcpp build --backend cuda",
        )
    if not gpus:
        return Check("cuda", WARN, f"{compilers[0]}, but no GPU answers", "does nvidia-smi work?")
    return str(gpu_tools.choose_nvcc(compilers, gpu_tools.wanted_architectures()))


def _disk() -> str | Check:
    folder = paths.cache_dir()
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.1f} GiB free for {folder}"
    if free < _BUILD_GIB:
        fix = "free some, or set DFLASHCPP_CACHE to a folder on a larger disk"
        return Check("disk", FAIL, f"{text}, a build needs about {_BUILD_GIB:.0f}", fix)
    return text


def _build() -> str | Check:
    from dflashcpp import llamacpp

    found = llamacpp.find_build()
    if found is None:
        return Check("llama.cpp", WARN, "no build that is up to date", "dflashcpp build")
    return f"{found.version_string or found.base} for {found.backend} in {found.root}"


def _models() -> str:
    from dflashcpp import pairs

    here = [pair.name for pair in pairs.list_pairs() if pairs.local_target(pair)]
    from huggingface_hub import constants

    return f"targets here: {', '.join(here) or 'none'}; Hub cache: {constants.HF_HUB_CACHE}"


def _port(port: int) -> str | Check:
    from dflashcpp.server import ports, registry

    if registry.alive(port):
        return f"{port} is used by a server of ours"
    try:
        ports.check_port("127.0.0.1", port)
    except DflashError as error:
        return Check("port", WARN, error.message, error.hint or "")
    return f"{port} is free"


def _servers() -> str | Check:
    """Servers of ours: running, ended without being stopped, and running with nobody looking after them."""
    from dflashcpp.server import registry

    found = registry.noted()
    ended = [one for one in found if one.state() == "ended"]
    orphans = [one for one in found if one.running and one.supervisor and not one.supervisor.alive()]
    if orphans:
        names = ", ".join(f"{one.url} (pid {one.process.pid})" for one in orphans)
        return Check("servers", WARN, f"nobody looks after {names}", "dflashcpp stop --port PORT")
    if ended:
        names = ", ".join(one.url for one in ended)
        return Check(
            "servers",
            WARN,
            f"ended without being stopped: {names}",
            f"their logs: {ended[0].log.parent.parent}",
        )
    running = [one.url for one in found]
    return f"running: {', '.join(running)}" if running else "none of ours runs"


def _environment() -> str | Check:
    from dflashcpp.server.launch import inherited

    names = inherited()
    if names:
        return Check(
            "environment", WARN, f"llama-server also reads {', '.join(names)}", "unset what you do not want"
        )
    proxies = [name for name in ("http_proxy", "https_proxy", "HTTPS_PROXY") if os.environ.get(name)]
    return f"proxies: {', '.join(proxies)}" if proxies else "no LLAMA_ARG_* variables"


# -- a server --------------------------------------------------------------------------------------


def server(client: Client) -> Iterator[Check]:
    """The checks of one running server, each a request or two."""
    looks: list[tuple[str, Callable[[], str | Check]]] = [
        ("answers", lambda: _answers(client)),
        ("drafting", lambda: _drafting(client)),
        ("two requests", lambda: _two_requests(client)),
        ("warm prefix", lambda: _warm_prefix(client)),
        ("json schema", lambda: _json_schema(client)),
    ]
    for name, look in looks:
        found = _checked(name, look)
        yield found
        if name == "answers" and found.state == FAIL:
            return


def _answers(client: Client) -> str | Check:
    if client.health() != "ready":
        return Check(
            "answers", FAIL, f"{client.url} is {client.health()}", "dflashcpp status; dflashcpp logs"
        )
    from dflashcpp.server.readiness import serves_nothing

    if serves_nothing(client):
        return Check("answers", FAIL, "the server has no model loaded (router mode)", "start it with -m")
    props = client.props()
    return f"{props.get('model_path', 'n/a')}, llama.cpp {props.get('build_info', 'n/a')}"


def _drafting(client: Client) -> str | Check:
    attached = client.speculative()
    answer = _greedy(client, _CODE, 64)
    timings = answer.timings
    if timings is None or not timings.drafted:
        if attached is False:
            return Check("drafting", SKIP, "no drafter is attached")
        if timings is not None and timings.steps_of_length:
            return Check(
                "drafting", SKIP, "a drafter is attached and rests: drafting does not pay at the moment"
            )
        return Check(
            "drafting", FAIL, "a drafter is attached but drafted nothing", "look at --spec-draft-p-min"
        )
    if not timings.accepted:
        return Check(
            "drafting",
            FAIL,
            f"none of {timings.drafted} drafted tokens was accepted on code",
            "a quantised draft cache (-ctkd)? a wrong conversion? dflashcpp verify compares with the source",
        )
    length = timings.mean_accepted_length
    shown = "n/a (start it with --metrics)" if length is None else f"{length:.2f}"
    return f"{timings.accepted} of {timings.drafted} accepted on code, mean accepted length {shown}"


def _two_requests(client: Client) -> str:
    """The second request shorter than the first: on some builds that one crashed."""
    first, second = _greedy(client, _LONG, 8), _greedy(client, _SHORT, 8)
    return f"{_prompt(first)} and then {_prompt(second)} prompt tokens answered"


def _prompt(answer: Answer) -> int:
    timings = answer.timings
    return 0 if timings is None else timings.prompt_n + (timings.cached_n or 0)


def _warm_prefix(client: Client) -> str | Check:
    """The same question again takes its prompt from the cache and gives the same greedy answer."""
    cold, warm = _greedy(client, _LONG, 24), _greedy(client, _LONG, 24)
    cached = warm.timings.cached_n if warm.timings else None
    if cold.text != warm.text:
        return Check(
            "warm prefix",
            WARN,
            "the answer changed when its prompt came from the cache",
            "a near tie, or a bug: see doctor PAIR",
        )
    return f"same answer with {cached if cached is not None else 'n/a'} prompt tokens from the cache"


def _json_schema(client: Client) -> str | Check:
    import json

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.chat("Give me a number as JSON.", temperature=0, max_tokens=64, response_format=form)
    try:
        value = json.loads(answer.text)["n"]
    except (ValueError, KeyError, TypeError):
        return Check("json schema", FAIL, f"the answer does not follow the schema: {answer.text[:60]!r}")
    return f"followed: n = {value}"


def _greedy(client: Client, text: str, tokens: int) -> Answer:
    return client.chat(text, temperature=0, max_tokens=tokens)


def greedy_answer(client: Client) -> Answer:
    """A coding answer with its token ids, for `greedy_agreement`."""
    prompt = client.apply_template(_CODE)
    return client.complete(prompt, n_predict=96, temperature=0, cache_prompt=False, return_tokens=True)


def greedy_agreement(without: Client, drafted: Answer) -> Check:
    """Whether a server without the drafter gives the same answer, or one that parts at a proved tie."""
    from dflashcpp.agreement import compare

    def look() -> str | Check:
        if drafted.timings is not None and drafted.timings.drafted == 0:
            return Check(
                "greedy text",
                WARN,
                "nothing was drafted, so nothing is proved",
                "serve it with --no-spec-draft-adaptive and look again",
            )
        prompt = without.tokenize(without.apply_template(_CODE), begin=True)
        found = compare(without, prompt, greedy_answer(without).tokens, drafted.tokens)
        if not found.agrees:
            return Check(
                "greedy text", FAIL, found.text(), "the drafter changes what is said: please report it"
            )
        return f"with and without the drafter: {found.text()}"

    return _checked("greedy text", look)
