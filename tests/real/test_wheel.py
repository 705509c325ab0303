"""A wheel built from this tree and installed elsewhere does the same job as the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in a folder with a space, with only the wheel of ours; dependencies are borrowed."""
    folder = tmp_path_factory.mktemp("some where else")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "-q", str(wheel)], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    borrowed = Path(sysconfig.get_paths()["purelib"])
    # The borrowed environment's own editable install of dflashcpp stays behind: its finder lives in a .pth
    # file, and those of a folder named in PYTHONPATH or another .pth are not run.
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return folder


def run(folder: Path, *arguments: str) -> dict:
    """Run the installed command from that folder and return its JSON object."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(folder / "venv" / "bin" / "dflashcpp"), *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_package_is_the_wheels_own(elsewhere: Path) -> None:
    code = "import dflashcpp; print(dflashcpp.__file__)"
    python = elsewhere / "venv" / "bin" / "python"
    told = subprocess.run([python, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True)
    assert Path(told.stdout.strip()).is_relative_to(elsewhere)


def test_the_wheels_patches_build_the_same_engine(elsewhere: Path, build_patched) -> None:
    built = run(elsewhere, "build")
    assert Path(built["llama_server"]) == build_patched.binary("llama-server")


def test_the_wheel_does_the_main_job(elsewhere: Path, build_patched) -> None:
    report = run(elsewhere, "demo")
    code = next(question for question in report["questions"] if question["kind"] == "code")
    assert code["agreement"]["verdict"] in {"identical", "tie"}
    assert code["with_drafter"]["mean_accepted_length"] > 1.5
    assert report["pass"] is True
