"""What `serve` and its relatives share: from words on the command line to a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflashcpp.errors import UsageError

if TYPE_CHECKING:
    from dflashcpp.cli._output import Output
    from dflashcpp.pairs import Pair
    from dflashcpp.server.flags import Parsed
    from dflashcpp.server.launch import Launch
    from dflashcpp.server.llama_server import Engine


def engine(build: str | None, output: Output, *, may_build: bool = True) -> Engine:
    """The llama-server to run; our build is made when there is none yet."""
    from dflashcpp import llamacpp, server

    if build is not None or llamacpp.find_build() is not None or not may_build:
        return server.find_engine(build)
    output.status("llama.cpp is not built yet: building it, which takes some minutes, once")
    return server.find_engine(llamacpp.build(progress=output.progress()))


def chosen_pair(words: tuple[str, ...]) -> Pair:
    """The pair that was named, else that of the config file, else the built-in one."""
    from dflashcpp import config
    from dflashcpp.pairs import load_pair

    if len(words) > 1:
        raise UsageError(f"one pair at most, but got: {' '.join(words)}", hint="known pairs: dflashcpp pairs")
    name = words[0] if words else config.default_pair()
    return load_pair(name)


def given(parsed: Parsed, engine: Engine, name: str) -> str | None:
    """The value given for a flag under any of its names."""
    found = [flag.value for flag in parsed.flags if engine.table.same(flag.name, name)]
    return found[-1] if found else None


def launch(
    engine: Engine, parsed: Parsed, output: Output, *, with_draft: bool, type: str | None
) -> tuple[Launch, Pair | None]:
    """The launch for `-m`/`-md`, or for a pair whose files are fetched and converted when needed."""
    from dflashcpp import server
    from dflashcpp.server.launch import check_allowed

    model, draft = given(parsed, engine, "--model"), given(parsed, engine, "--model-draft")
    if model is not None:
        if parsed.words:
            raise UsageError(f"either a pair ({parsed.words[0]}) or -m {model}, not both")
        return server.prepare(engine, parsed, model, draft if with_draft else None), None
    check_allowed(engine.table, parsed.flags, parsed.verbatim)
    pair = chosen_pair(parsed.words)
    progress = output.progress()
    if draft is not None and with_draft:
        from dflashcpp.pairs import ensure_target

        target = ensure_target(pair, progress)
        made = server.prepare(engine, parsed, target, draft, recommended=pair.flags, alias=pair.name)
        return made, pair
    return server.pair_launch(engine, pair, parsed, with_draft=with_draft, type=type, progress=progress), pair


def planned(
    engine: Engine, parsed: Parsed, *, with_draft: bool, type: str | None
) -> tuple[Launch, list[str]]:
    """The launch as it would be, and what would be fetched or converted first; nothing is done."""
    from dflashcpp import pairs, paths, server
    from dflashcpp.server.launch import compose

    model, draft = given(parsed, engine, "--model"), given(parsed, engine, "--model-draft")
    if model is not None:
        return server.prepare(engine, parsed, model, draft if with_draft else None), []
    pair = chosen_pair(parsed.words)
    target, source = pairs.local_target(pair), pairs.local_source(pair)
    kind = (type or pair.drafter.type or "Q4_K_M").upper()
    missing = [] if target else [f"fetch the target: {pair.target.where}"]
    place: Path | None = Path(draft) if draft else None
    if with_draft and place is None:
        missing += [] if source else [f"fetch the drafter: {pair.drafter.where}"]
        named = f"dflash-{pair.name}-{kind}.gguf"
        place = pairs.drafter_place(pair, source, target, kind) if target and source else None
        if place is None or not place.is_file():
            missing.append(f"convert the drafter to {kind}")
            place = place or paths.cache_dir("drafters") / named
    place = place if with_draft else None
    if not missing and target is not None:
        return server.prepare(engine, parsed, target, place, recommended=pair.flags, alias=pair.name), []
    made = compose(
        engine.table,
        engine.binary,
        parsed.flags,
        parsed.verbatim,
        model=target or paths.cache_dir("models") / pair.target.file,
        draft=place,
        depth=int(pair.facts["drafter"]["block_size"]) - 1,
        version=int(pair.facts["drafter"]["version"]),
        recommended=pair.flags,
        alias=pair.name,
    )
    return made, missing
