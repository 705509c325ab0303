"""The command line as a whole: help, exit codes, and JSON whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflashcpp.cli import app as cli


def dflashcpp(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real program in a process of its own."""
    return subprocess.run([sys.executable, "-m", "dflashcpp", *arguments], capture_output=True, text=True)


def test_help_lists_every_command() -> None:
    done = dflashcpp("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in cli.COMMANDS)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from dflashcpp.cli.app import run; run(['--help']);"
        "heavy = {'dflashcpp.llamacpp', 'dflashcpp.drafter', 'importlib.metadata', 'numpy', 'torch', 'gguf',"
        "'requests', 'huggingface_hub', 'psutil', 'safetensors', 'rich'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert cli.run([name, "--help"]) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["frobnicate"], "No such command"),
        (["convert"], "Missing argument"),
        (["convert", "x", "--frobnicate"], "No such option"),
        (["build", "--jobs", "many"], "Invalid value"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], word: str) -> None:
    done = dflashcpp(*arguments, "--json")
    assert done.returncode == 2
    assert word in json.loads(done.stdout)["error"]
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_failure_with_json_is_one_object_on_stdout() -> None:
    done = dflashcpp("convert", "/no/such/model.safetensors", "--json")
    assert done.returncode == 1
    assert "/no/such/model.safetensors" in json.loads(done.stdout)["error"]


def test_without_json_errors_leave_stdout_alone() -> None:
    done = dflashcpp("convert", "/no/such/model.safetensors")
    assert done.stdout == ""


def test_version_is_the_packages() -> None:
    import importlib.metadata

    assert dflashcpp("--version").stdout.split() == ["dflashcpp", importlib.metadata.version("dflashcpp")]


def test_public_names_are_loaded_when_used() -> None:
    code = (
        "import sys, dflashcpp; assert not [m for m in sys.modules if m.startswith('dflashcpp.')];"
        "assert all(callable(getattr(dflashcpp, name)) for name in dflashcpp.__all__);"
        "import dflashcpp.conversion, dflashcpp.memory, dflashcpp.llamacpp;"
        "assert all(callable(getattr(dflashcpp, name)) for name in dflashcpp.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
