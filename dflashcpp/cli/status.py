"""`dflashcpp status`: the servers of ours on this machine."""

from __future__ import annotations

from dataclasses import asdict

from dflashcpp.cli import _remote
from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output


def status(
    ssh: _remote.SshOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the servers that `serve` and LlamaServer started here: address, state, process, model."""
    from dflashcpp.server import registry

    output = Output(as_json=as_json)
    if ssh is not None:
        _remote.status(output, _remote.reach(ssh, ssh_option, ssh_config)[1])
        return
    found = [(one, one.state()) for one in registry.noted()]
    if as_json:
        rows = [{**one.facts, "state": state, "process": asdict(one.process)} for one, state in found]
        output.result({"servers": rows})
        return
    if not found:
        output.text("no server of ours runs")
        return
    headers = ["address", "state", "pid", "restarts", "drafter", "model"]
    output.table(
        headers,
        [
            [
                one.url,
                state,
                one.process.pid,
                len(one.facts.get("restarts") or ()),
                _name(one.facts.get("draft")),
                _name(one.facts.get("model")),
            ]
            for one, state in found
        ],
    )


def _name(path: object) -> str:
    return str(path).rsplit("/", 1)[-1] if path and str(path) != "None" else "none"
