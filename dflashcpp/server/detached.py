"""A server that stays when the terminal goes: started and looked after by a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress, Task
from dflashcpp.server import supervise
from dflashcpp.server.flags import Given
from dflashcpp.server.launch import Launch
from dflashcpp.server.llama_server import LlamaServer, folder_of
from dflashcpp.server.ports import check_port
from dflashcpp.server.process import Identity
from dflashcpp.server.readiness import last_line


def start(launch: Launch, *, restart: bool = False, progress: Progress = SILENT) -> dict[str, Any]:
    """Start a launch in the background and wait until it is ready; what `LlamaServer.report` tells.

    Raises DflashError with the reason when it does not come up; nothing is left running then.
    """
    check_port(launch.host, launch.port)
    folder = folder_of(launch.port)
    answer = folder / "start.json"
    answer.unlink(missing_ok=True)
    order = json.dumps({"launch": _plain(launch), "restart": restart})
    with (folder / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflashcpp.server.detached", str(answer)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(order.encode())
    try:
        with progress.task("starting in the background") as task:
            _wait(process, answer, folder, task)
    except BaseException:
        process.terminate()  # it ends its child
        raise
    told = json.loads(answer.read_text())
    answer.unlink(missing_ok=True)
    if "error" in told:
        raise DflashError(told["error"], hint=told["hint"])
    return dict(told)


def _wait(process: subprocess.Popen[bytes], answer: Path, folder: Path, task: Task) -> None:
    while not answer.exists():
        if process.poll() is not None and not answer.exists():
            log = folder / "supervisor.log"
            raise DflashError(f"the background process ended: {last_line(log)}", hint=f"its log: {log}")
        task.note(last_line(folder / "server.log"))
        time.sleep(0.05)


def _plain(launch: Launch) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(launch), default=str))


def _launch(plain: dict[str, Any]) -> Launch:
    """A Launch from plain values."""
    flags = tuple(Given(row["name"], row["value"], tuple(row["more"])) for row in plain["flags"])
    files = {key: Path(plain[key]) if plain[key] else None for key in ("draft", "api_key_file")}
    lists = {key: tuple(plain[key]) for key in ("verbatim", "notes", "warnings")}
    own = {"flags": flags, "binary": Path(plain["binary"]), "model": Path(plain["model"]), **files, **lists}
    return Launch(**{**plain, **own})


def _tell(answer: Path, data: dict[str, Any]) -> None:
    temporary = answer.with_suffix(".part")
    temporary.write_text(json.dumps(data, default=str))
    temporary.replace(answer)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


def main() -> int:
    """The background process: start, tell how it went, look after it until told to end."""
    order = json.loads(sys.stdin.read())
    answer = Path(sys.argv[1])
    server = LlamaServer.of(_launch(order["launch"]))
    server.supervisor = Identity.of_this()
    with supervise.Signals():
        try:
            with server:
                _tell(answer, server.report())
                supervise.watch(server, restart=order["restart"], say=_say)
        except supervise.Told as told:
            _say(f"ended by {told}")
        except DflashError as error:
            _say(error.message)
            if not answer.exists() and server.proof is None and server.memory is None:
                _tell(answer, {"error": error.message, "hint": error.hint})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
