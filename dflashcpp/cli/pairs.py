"""`dflashcpp pairs`: the known pairs of target and drafter."""

from __future__ import annotations

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output


def pairs(as_json: JsonOption = False) -> None:
    """List the known pairs: what they are, how large, and whether they are on this machine."""
    from dataclasses import asdict

    from dflashcpp import config
    from dflashcpp import pairs as known

    output = Output(as_json=as_json)
    chosen = config.default_pair()
    rows, data = [], []
    for pair in known.list_pairs():
        here = {"target": known.local_target(pair), "drafter": known.local_source(pair)}
        used = pair.name == chosen if chosen else pair.default
        data.append(
            {**asdict(pair), "used": used, "local": {key: path and str(path) for key, path in here.items()}}
        )
        rows.append(
            [
                pair.name + (" *" if used else ""),
                _mib(pair.target.bytes),
                "yes" if here["target"] else "no",
                _mib(pair.drafter.bytes),
                "yes" if here["drafter"] else "no",
                pair.title,
            ]
        )
    if as_json:
        output.result({"pairs": data})
        return
    output.table(["pair", "target MiB", "here", "drafter MiB", "here", "what"], rows)
    output.status("* is served when no pair is named; choose with: dflashcpp use PAIR")


def _mib(count: int | None) -> str:
    return f"{count / 2**20:.0f}" if count else "n/a"
