"""The script of docs/python.md runs as it stands, and the openai package works against our server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflashcpp import LlamaServer, pairs
from dflashcpp.llamacpp import Build

# the scripts say none of this: a long answer on all cores of a busy machine would take minutes
SHORT = {"LLAMA_ARG_N_PREDICT": "256", "LLAMA_ARG_THREADS": "1"}

pytestmark = [pytest.mark.real, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_the_script_of_the_python_page_runs(build_patched: Build, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert len([line for line in found.group(1).splitlines() if line.strip()]) <= 15
    script = (
        found.group(1)
        .replace("models/smollm2", f"{ROOT}/models/smollm2")
        .replace("build=build()", "build=BUILD")
    )
    (tmp_path / "script.py").write_text(f"BUILD = {str(build_patched.binary('llama-server'))!r}\n{script}")
    said = _said(tmp_path / "script.py")
    assert "MiB planned" in said
    # with the adaptive length a machine on which drafting does not pay drafts nothing
    assert re.search(r"mean accepted length [0-9.]+|nothing drafted", said)


def test_the_script_of_the_readme_runs(build_patched: Build, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "script.py").write_text(found.group(1))
    assert len(_said(tmp_path / "script.py")) > 20


def _said(script: Path) -> str:
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        capture_output=True,
        text=True,
        env=os.environ | SHORT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_package_works_against_our_server(build_patched: Build) -> None:
    openai = pytest.importorskip("openai")
    pair = pairs.load_pair()
    target = pairs.ensure_target(pair)
    drafter = pairs.ensure_drafter(pair, target=target)
    flags = {"alias": "small", "threads": 1, "ctx_size": 1024, "spec_draft_adaptive": False}
    with LlamaServer(target, drafter, build=build_patched, **flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
        assert client.models.list().data[0].id == "small"
        options = {"model": "small", "temperature": 0, "max_tokens": 24}
        message = [{"role": "user", "content": "Count from one to five."}]
        whole = client.chat.completions.create(messages=message, **options).choices[0].message.content
        chunks = client.chat.completions.create(messages=message, stream=True, **options)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == whole == server.client().chat(message, temperature=0, max_tokens=24).text
