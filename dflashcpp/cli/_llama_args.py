"""Commands that take llama-server's flags as they are.

Click would read `-mg 0` as `-m g` and `-hf` as `-h`, so such a command declares long options of its own only;
everything else is kept in order and split later by the table of the build's own `--help`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
_AFTER = "dflashcpp.after"


class LlamaCommand(TyperCommand):
    """Keeps what follows `--` apart, and knows `-h` on its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, with `--` and the rest set aside."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER] = args[cut:]
        own = ["--help" if word == "-h" else word for word in args[:cut]]
        return super().parse_args(ctx, own)


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PAIR] [FLAGS]...", help="A known pair, and llama-server's flags.", show_default=False
    ),
]
BuildOption = Annotated[
    str | None,
    typer.Option(
        "--build", metavar="FILE", help="The llama-server to run [default: our build of llama.cpp]."
    ),
]


def arguments(ctx: typer.Context, words: list[str] | None) -> list[str]:
    """All that was given, in order, `--` and the rest included."""
    return [*(words or []), *ctx.meta.get(_AFTER, [])]
