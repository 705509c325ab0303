"""Ports: is one free, who holds it, which one to take."""

from __future__ import annotations

import errno
import socket
from typing import Any

from dflashcpp.errors import DflashError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise DflashError in words when a server could not listen there."""
    if not 0 < port < 65536:
        raise DflashError(
            f"{port} is no port", hint="choose one from 1024 to 65535, or 0 for any that is free"
        )
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        raise _explained(host, port, error) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _explained(host: str, port: int, error: OSError) -> DflashError:
    if error.errno == errno.EADDRINUSE:
        holder = who_listens(port)
        by = f" by {holder}" if holder else ""
        return DflashError(
            f"port {port} on {host} is taken{by}",
            hint="choose another with --port, or --port 0 for any free one",
        )
    if error.errno == errno.EACCES:
        return DflashError(f"port {port} needs root rights", hint="choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return DflashError(f"{host} is no address of this machine", hint="--host 127.0.0.1 is the usual one")
    return DflashError(f"port {port} on {host} cannot be used: {error.strerror or error}")


def who_listens(port: int) -> str | None:
    """Name and pid of the process that listens on this port, when this user may know it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if _listens(connection, port) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return None
    return None


def _listens(connection: Any, port: int) -> bool:
    return connection.status == "LISTEN" and bool(connection.laddr) and connection.laddr.port == port
