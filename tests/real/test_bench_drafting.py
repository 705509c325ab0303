"""The benchmark of drafting on real servers, as short as it can be."""

from __future__ import annotations

import json

import pytest

from benchmarks import drafting
from benchmarks.draft_columns import ALL, BASE
from dflashcpp.llamacpp import Build

pytestmark = [pytest.mark.real, pytest.mark.slow]

SHORT = "--rounds 1 --threads 1 --only held-out/code --max-tokens 16 --conversations 1 --temperature 0"


def test_a_short_run_measures_and_compares_real_servers(
    build_patched: Build, build_pristine: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = []
    for name, build in (("--ours", build_patched), ("--pristine", build_pristine)):
        servers += [name, str(build.binary("llama-server"))]
    columns = ["--columns", "pristine 2", "--columns", ALL]
    code = drafting.main(
        [*SHORT.split(), *servers, *columns, "--part", "generation", "--part", "call", "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    assert code in (0, 1), found
    made = {row["column"]: row for row in found["samples"] if row["part"] == "generation"}
    assert set(made) == {BASE, "pristine 2", ALL}
    assert made[BASE]["drafted"] == 0 and made[BASE]["verify_steps"] == 0
    assert made["pristine 2"]["drafted"] > 0 and made["pristine 2"]["verify_steps"] > 0
    # adaptive: drafting may not pay here
    assert (made[ALL]["drafted"] > 0) == (made[ALL]["verify_steps"] > 0)
    assert {row["column"]: row["amount"] for row in found["samples"] if row["part"] == "call"}[ALL] > 0
    assert {row["word"] for row in found["verdicts"]} <= {"identical", "tie", "unsteady"}
    assert found["machine"]["builds"]["ours"].endswith(build_patched.digest)
