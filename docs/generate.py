"""Writes docs/cli.md from the program itself: `make docs`. With --check only says whether it is stale."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(COLUMNS="100", TERM="dumb", NO_COLOR="1", TERMINAL_WIDTH="100")

from typer.testing import CliRunner

from dflashcpp.cli import app as cli

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command reference

Generated from the program by `make docs`; do not edit.
Exit codes: 0 done, 1 failed, 2 wrong usage. Data goes to stdout, talk to stderr.
"""


def page() -> str:
    """The whole reference page, from each command's own --help."""
    cli.register()
    parts = [HEAD, _section("dflashcpp", [])]
    parts += [_section(f"dflashcpp {name}", [name]) for name in cli.COMMANDS]
    return "\n".join(parts)


def _section(title: str, arguments: list[str]) -> str:
    result = CliRunner().invoke(cli.app, [*arguments, "--help"], prog_name="dflashcpp", terminal_width=100)
    if result.exit_code != 0:
        raise SystemExit(f"`{title} --help` failed: {result.output}")
    text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
    return f"## {title}\n\n```text\n{text}\n```\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare it with the one that stands there."""
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write("docs/cli.md is stale: run `make docs` and commit it\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
