"""The exact ssh command lines. The system's OpenSSH does the work, with the user's own settings.

Keys, agents, jump hosts and host aliases come from `~/.ssh/config`. Host keys are never bypassed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from dflashcpp.config import Profile
from dflashcpp.errors import UsageError

CONNECT_SECONDS = 15
ALIVE_SECONDS = 15
ALIVE_COUNT = 3
_BATCH = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
_ALIVE = ("-o", f"ServerAliveInterval={ALIVE_SECONDS}", "-o", f"ServerAliveCountMax={ALIVE_COUNT}")
_BYPASS = re.compile(
    r"stricthostkeychecking\W*(no|off|accept-new)\b|knownhostsfile\W*(/dev/null|none)\b"
    r"|nohostauthenticationforlocalhost\W*yes|verifyhostkeydns\W*yes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ssh:
    """How to reach one host: its name as ssh takes it, and extra words for ssh (`-F FILE`, `-o K=V`)."""

    host: str
    options: tuple[str, ...] = ()
    program: str = "ssh"

    def __post_init__(self) -> None:
        if (
            not self.host
            or self.host.startswith("-")
            or re.search(r"[\s\x00-\x1f\x7f'\"`$;&|<>()\\]", self.host)
        ):
            raise UsageError(f"{self.host!r} is no SSH host", hint="give HOST or USER@HOST as ssh takes it")
        if _BYPASS.search(" ".join(self.options)):
            raise UsageError(
                "the SSH options switch the check of host keys off; that is not done here",
                hint=f"accept the key once with: ssh {self.host}",
            )

    @classmethod
    def of(cls, profile: Profile, options: Sequence[str] = ()) -> Ssh:
        """The host of a profile, with further ssh words."""
        return cls(profile.host, (*profile.ssh_options, *options))


def tunnel_argv(ssh: Ssh, local_port: int, remote_port: int) -> list[str]:
    """The supervised forward: a connection of its own, that ends when it cannot do its work.

    ControlPath=none: through a shared master, ssh would hand the forward over and exit at once, and
    the forward would outlive us (OpenSSH mux.c, mux_client_forward).
    """
    forward = f"127.0.0.1:{local_port}:127.0.0.1:{remote_port}"
    quiet = (
        "-o",
        "LogLevel=INFO",
        "-o",
        "ControlPath=none",
        "-o",
        "ControlMaster=no",
        "-o",
        "PermitLocalCommand=no",
    )
    fail = ("-o", "ExitOnForwardFailure=yes")
    return [
        ssh.program,
        *_BATCH,
        *fail,
        *_ALIVE,
        *quiet,
        *ssh.options,
        "-N",
        "-T",
        "-L",
        forward,
        "--",
        ssh.host,
    ]


def master_argv(ssh: Ssh, action: str, local_port: int = 0, remote_port: int = 0) -> list[str]:
    """`ssh -O ACTION` (check, forward, cancel) to the user's own running master."""
    forward = ("-L", f"127.0.0.1:{local_port}:127.0.0.1:{remote_port}") if local_port else ()
    return [ssh.program, *_BATCH, *ssh.options, "-O", action, *forward, "--", ssh.host]


def script_argv(ssh: Ssh) -> list[str]:
    """A POSIX shell on the far side that reads its script from stdin, whatever the login shell is."""
    return [ssh.program, *_BATCH, *_ALIVE, *ssh.options, "-T", "--", ssh.host, "exec sh -s"]


def data_argv(ssh: Ssh, script: str, arguments: Sequence[str]) -> list[str]:
    """A one-line script on the far side whose stdin is ours to fill with data."""
    command = " ".join(_for_any_shell(word) for word in ["sh", "-c", script, "sh", *arguments])
    own = ("-o", "ControlMaster=no")
    return [ssh.program, *_BATCH, *_ALIVE, *own, *ssh.options, "-T", "--", ssh.host, f"exec {command}"]


def _for_any_shell(word: str) -> str:
    """A word quoted for POSIX shells and for fish, where a backslash means something in single quotes."""
    if "\\" not in word:
        return shlex.quote(word)
    specials = {"'": "'\"'\"'", "\\": "'\"\\\\\"'"}
    return "'" + "".join(specials.get(letter, letter) for letter in word) + "'"


def script_text(body: str, arguments: Sequence[str], mark: str) -> str:
    """`body` as a complete script: arguments quoted into it, output framed by `mark`, on a leash.

    The script is one function, so that the shell has read all of it before any command could eat the
    rest of stdin. The frame keeps what a login shell prints apart from the answer. The leash is our
    end of stdin: when it closes (we ended, or the link did), the body is ended too.
    """
    words = " ".join(shlex.quote(argument) for argument in arguments)
    return _SCRIPT.format(body=body, words=words, mark=mark)


_SCRIPT = """\
dflashcpp_main() {{
{body}
}}
dflashcpp_all() {{
cd "$HOME" || exit 1
exec 3<&0
printf '%s\\n' '{mark} begin'
(dflashcpp_main {words}) </dev/null 3<&- &
body=$!
(cat <&3; kill -TERM "$body") >/dev/null 2>&1 &
leash=$!
exec 3<&-
wait "$body"
status=$?
kill "$leash" 2>/dev/null
printf '%s %s\\n' '{mark} end' "$status"
exit 0
}}
dflashcpp_all
"""


def shown(argv: Sequence[str]) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(argv)
