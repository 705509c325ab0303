"""`dflashcpp use`: the pair that is served when none is named."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output


def use(
    pair: Annotated[str | None, typer.Argument(metavar="[PAIR]", help="One of `dflashcpp pairs`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Remember PAIR in the config file; without PAIR say which one is used."""
    from dflashcpp import config, paths
    from dflashcpp.pairs import load_pair

    output = Output(as_json=as_json)
    if pair is None:
        name = config.default_pair() or load_pair().name
    else:
        name = load_pair(pair).name
        config.set_value(["pair"], name)
    output.result({"pair": name, "config": str(paths.config_file())}, name)
