"""The command table, and the one place where an error becomes an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from dflashcpp.cli._output import Output
from dflashcpp.errors import DflashError, UsageError

# A module `dflashcpp.cli.<module>` holds a function of the command's name; the order is that of --help.
COMMANDS = (
    "demo",
    "convert",
    "inspect",
    "verify",
    "build",
    "patches",
    "plan",
    "serve",
    "chat",
    "status",
    "logs",
    "stop",
    "tunnel",
    "pull",
    "pairs",
    "use",
    "doctor",
)

app = typer.Typer(
    name="dflashcpp",
    help="DFlash and DFlash-2 drafters in llama.cpp: convert, build, plan memory, serve, measure.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(value: bool) -> None:
    if value:
        import importlib.metadata

        Output().text(f"dflashcpp {importlib.metadata.version('dflashcpp')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Nothing of its own: the commands do the work."""


def register() -> None:
    """Add every command of COMMANDS to the application, once."""
    if app.registered_commands:
        return
    for name in COMMANDS:
        module = importlib.import_module(f"dflashcpp.cli.{name}")
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        kind = getattr(module, "COMMAND_CLASS", None)
        app.command(name, cls=kind, context_settings=settings, no_args_is_help=False)(getattr(module, name))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong usage.

    Errors of ours become a sentence and a next step; Ctrl-C is 130, a closed pipe is quiet.
    """
    register()
    arguments = arguments or ["--help"]
    before, _, _ = "\0".join(arguments).partition("\0--\0")
    Output.answered = False
    output = Output(as_json="--json" in before.split("\0"))
    try:
        return app(arguments, standalone_mode=False) or 0
    except DflashError as error:
        output.error(error)
        return error.exit_code
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.status("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        output.error(DflashError(f"{error.strerror or error}{where}"))
        return 1
    except TyperException as error:
        where = f"dflashcpp {arguments[0]} --help" if arguments[0] in COMMANDS else "dflashcpp --help"
        output.error(UsageError(error.format_message(), hint=f"`{where}` says what it takes"))
        return error.exit_code
