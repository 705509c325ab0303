"""S3: a fake `ssh` for PATH. A local relay that can refuse, accept then close, freeze, die after N seconds.

`install(folder, mode, ...)` writes the program; its answers are real OpenSSH 9.2 texts. It also runs
`sh -s` and `sh -c` commands locally, with HOME set to the "remote" home, as sshd would.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

REFUSALS = {
    "resolve": "ssh: Could not resolve hostname far: Name or service not known",
    "refused": "ssh: connect to host far port 22: Connection refused",
    "timeout": "ssh: connect to host far port 22: Connection timed out",
    "hung-up": (
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.7 port 22"
    ),
    "denied": "me@far: Permission denied (publickey,keyboard-interactive).",
    "unknown-key": "Host key verification failed.",
    "changed-key": (
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
        "Host key for far has changed and you have requested strict checking.\nHost key verification failed."
    ),
    "bad-option": "command-line: line 0: Bad configuration option: bogus",
    "cipher": "Unable to negotiate with 10.0.0.7 port 22: no matching cipher found. Their offer: aes128-ctr",
    "bind": (
        "bind [127.0.0.1]:8001: Address already in use\n"
        "channel_setup_fwd_listener_tcpip: cannot listen to port: 8001\nCould not request local forwarding."
    ),
    "forward": "Warning: remote port forwarding failed for listen port 8001",
    "jump": (
        "channel 0: open failed: connect failed: No route to host\nstdio forwarding failed\n"
        "kex_exchange_identification: Connection closed by remote host"
    ),
    "odd": "something ssh never said before",
}

_PROGRAM = """#!{python}
import json, os, signal, socket, subprocess, sys, threading, time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
with (FOLDER / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv) + "\\n")
settings = json.loads((FOLDER / "settings.json").read_text())
mode, rest = settings["mode"], settings.get("then", "relay")
count = len((FOLDER / "calls").read_text().splitlines())
if count > settings.get("times", 10**9):
    mode = rest


def say(text):
    print(text, file=sys.stderr, flush=True)


if "-O" in sys.argv:
    say("No ControlPath specified for \\"-O\\" command")
    sys.exit(255)
if mode in settings["refusals"]:
    say(settings["refusals"][mode])
    if settings.get("stay"):
        time.sleep(3600)
    sys.exit(255)
if mode == "hang":
    time.sleep(3600)

if "-L" not in sys.argv:
    words = sys.argv[sys.argv.index("--") + 2 :]
    home = settings["home"]
    if settings.get("motd"):
        print(settings["motd"], flush=True)
    environment = dict(os.environ, HOME=home, **settings.get("environment", {}))
    command = ["/bin/sh", "-c", " ".join(words)]
    cut = settings.get("cut_stdin")  # a link that breaks after so many bytes
    if cut is None or "sh -s" in words[-1]:
        os.chdir(home)
        os.execve("/bin/sh", command, environment)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=home, env=environment)
    while cut > 0:
        piece = os.read(0, min(65536, cut))
        if not piece:
            break
        child.stdin.write(piece)
        cut -= len(piece)
    child.stdin.close()
    child.wait()
    if cut > 0:
        sys.exit(child.returncode)
    say("client_loop: send disconnect: Broken pipe")
    sys.exit(255)

bind, local, _, remote = sys.argv[sys.argv.index("-L") + 1].split(":")
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    listener.bind((bind, int(local)))
except OSError:
    say("bind [%s]:%s: Address already in use" % (bind, local))
    sys.exit(255)
listener.listen(64)


def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def relay(near):
    try:
        far = socket.create_connection(("127.0.0.1", int(remote)))
    except OSError:
        say("channel 2: open failed: connect failed: Connection refused")
        near.close()
        return
    threads = [threading.Thread(target=pump, args=pair, daemon=True) for pair in ((near, far), (far, near))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    near.close()
    far.close()


def die():
    time.sleep(settings["after"])
    say("Timeout, server far not responding.")
    os._exit(255)


if mode == "die":
    threading.Thread(target=die, daemon=True).start()
kept = []
while True:
    near, _ = listener.accept()
    kept.append(near)
    if mode == "accept-close":
        near.close()
    elif mode == "forbidden":
        say("channel 2: open failed: administratively prohibited: open failed")
        near.close()
    elif mode != "freeze":
        threading.Thread(target=relay, args=(near,), daemon=True).start()
"""


class FakeSsh:
    """The program in `folder`; change what it does with `set`."""

    def __init__(self, folder: Path, mode: str = "relay", **settings: Any) -> None:
        self.folder = folder
        self.home = folder / "far home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.program = folder / "ssh"
        (folder / "fake.py").write_text(_PROGRAM)
        python, script = shlex.quote(sys.executable), shlex.quote(str(folder / "fake.py"))
        self.program.write_text(f'#!/bin/sh\nexec {python} {script} "$@"\n')
        self.program.chmod(0o755)
        self.set(mode, **settings)

    def set(self, mode: str, **settings: Any) -> None:
        """What the next calls do: a key of REFUSALS, or relay, accept-close, freeze, forbidden, hang, die.

        `times=N, then=MODE`: only the first N calls of all; `stay`: say it but live on; `after`: seconds.
        """
        facts = {"mode": mode, "home": str(self.home), "refusals": REFUSALS, **settings}
        temporary = self.folder / "settings.new"
        temporary.write_text(json.dumps(facts))
        temporary.replace(self.folder / "settings.json")

    def calls(self) -> list[list[str]]:
        """The argv of every call so far."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def environment(self) -> dict[str, str]:
        """An environment whose PATH finds this ssh first."""
        return {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
