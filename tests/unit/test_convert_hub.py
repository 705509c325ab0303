"""Sources and targets on the Hub, against a hub on this machine; every fault has its own sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import t1, t1_v2, write_checkpoint, write_target
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

DRAFTER, TARGET = "z-lab/Tiny-DFlash", "tiny/Target-GGUF"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as running:
        source = write_checkpoint(tmp_path / "published", t1_v2())
        (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: tiny/Target\n---\n")
        running.add(DRAFTER, source)
        files = tmp_path / "target"
        write_target(files / "Target-1B-Q4_K_M.gguf", weights=False)
        write_target(files / "Target-1B-Q8_0.gguf", weights=False, hidden=128)
        (files / "mmproj-Q4_K_M.gguf").write_bytes(b"GGUF")
        running.add(TARGET, files)
        yield running


def dflashcpp(
    folder: Path, hub: FakeHub, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its settings when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {
        **clean,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf home"),
        "DFLASHCPP_CACHE": str(folder / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **environment,
    }
    command = [sys.executable, "-m", "dflashcpp", *arguments]
    return subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, timeout=120)


def convert(folder: Path, hub: FakeHub, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    target = [] if "--target" in more else ["--target", f"{TARGET}:Q4_K_M"]
    return dflashcpp(folder, hub, "convert", DRAFTER, "-q", "bf16", *target, *more, **environment)


def test_a_drafter_is_converted_straight_from_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    done = convert(tmp_path, hub, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["file"], said["version"]) == ("dflash-Tiny-DFlash-BF16.gguf", 2)
    from gguf import GGUFReader

    reader = GGUFReader(tmp_path / said["file"])
    keys = ("general.source.repo_url", "general.license", "dflashcpp.source.revision")
    found = [reader.get_field(key).contents() for key in keys]  # type: ignore[union-attr]
    assert found == [f"https://huggingface.co/{DRAFTER}", "apache-2.0", COMMIT]


def test_of_a_remote_target_only_the_header_is_read(tmp_path: Path, hub: FakeHub) -> None:
    name = "Target-1B-Q4_K_M.gguf"
    hub.repos[TARGET][name] += b"\0" * (8 << 20)  # as if it had weights
    done = convert(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    asked = [(path, span) for method, path, span in hub.requests if path.endswith(name) and method == "GET"]
    assert asked and all(span is not None for _, span in asked)
    assert hub.sent < len(hub.repos[DRAFTER]["model.safetensors"]) + (2 << 20)


def test_a_second_conversion_needs_no_network(tmp_path: Path, hub: FakeHub) -> None:
    target = write_target(tmp_path / "t.gguf", weights=False)
    assert convert(tmp_path, hub, "--target", str(target)).returncode == 0
    again = convert(tmp_path, hub, "--target", str(target), HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gated", ["gated", f"huggingface.co/{DRAFTER}", "HF_TOKEN"]),
        ("missing", ["does not exist", "private"]),
        ("unauthorised", ["401"]),
        ("forbidden", ["403"]),
        ("broken", ["500"]),
    ],
)
def test_every_refusal_has_its_own_sentence(
    tmp_path: Path, hub: FakeHub, fault: str, words: list[str]
) -> None:
    hub.faults[DRAFTER] = fault
    done = convert(tmp_path, hub)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.glob("*.gguf")) == []


def test_no_network_and_no_cache_is_said(tmp_path: Path, hub: FakeHub) -> None:
    done = convert(tmp_path, hub, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert DRAFTER in done.stderr and "network" in done.stderr
    offline = convert(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "HF_HUB_OFFLINE" in offline.stderr


def test_a_download_that_breaks_off_is_resumed(tmp_path: Path, hub: FakeHub) -> None:
    hub.add(DRAFTER, write_checkpoint(tmp_path / "large", t1(intermediate_size=10240)))
    hub.faults[DRAFTER] = "cut once"
    done = convert(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    asked = [(path, span) for method, path, span in hub.requests if method == "GET"]
    assert any(span for path, span in asked if path.endswith("model.safetensors"))


def test_a_download_that_never_ends_well_is_said(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults[DRAFTER] = "cut"
    done = convert(tmp_path, hub)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "could not be downloaded" in done.stderr and "again" in done.stderr


def test_the_token_of_the_environment_is_sent(tmp_path: Path, hub: FakeHub) -> None:
    assert convert(tmp_path, hub, HF_TOKEN="hf_secret").returncode == 0
    assert hub.tokens == {"Bearer hf_secret"}


def test_another_kind_of_drafter_is_refused_before_its_weights_travel(tmp_path: Path, hub: FakeHub) -> None:
    config = t1(dflash_config={"projector_type": "domino"})
    hub.repos[DRAFTER]["config.json"] = json.dumps(config).encode()
    done = convert(tmp_path, hub)
    assert done.returncode == 1 and "Domino" in done.stderr
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_repository_of_gguf_files_needs_no_conversion(tmp_path: Path, hub: FakeHub) -> None:
    done = dflashcpp(tmp_path, hub, "convert", TARGET, "-q", "bf16")
    assert done.returncode == 1 and "Target-1B-Q8_0.gguf" in done.stderr and "no conversion" in done.stderr


def test_a_quant_that_is_not_there_lists_those_that_are(tmp_path: Path, hub: FakeHub) -> None:
    done = convert(tmp_path, hub, "--target", f"{TARGET}:Q2_K")
    assert done.returncode == 1 and "Target-1B-Q8_0.gguf" in done.stderr


def test_a_checkpoint_in_a_folder_of_the_repository_is_found(tmp_path: Path, hub: FakeHub) -> None:
    files = hub.repos.pop(DRAFTER)
    hub.repos[DRAFTER] = {f"dflash/{name}": data for name, data in files.items()} | {"README.md": b"# card"}
    assert convert(tmp_path, hub).returncode == 0


def test_without_a_target_the_wanted_one_is_named(tmp_path: Path, hub: FakeHub) -> None:
    done = dflashcpp(tmp_path, hub, "convert", DRAFTER, "-q", "bf16")
    assert done.returncode == 1 and "tiny/Target" in done.stderr and "--target" in done.stderr
