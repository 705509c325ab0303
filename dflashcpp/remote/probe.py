"""What answers at the near end of a tunnel: a whole valid answer counts, not an accepted connection."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

NOT_OPEN = "not open"
CLOSED = "closed at once"
SILENT = "silent"
LOADING = "server loading"
READY = "ready"
OTHER = "not llama-server"
_LIMIT = 4 << 20


@dataclass(frozen=True)
class Answer:
    """What was found, and in words what was seen; `model` is the served model's name when ready."""

    state: str
    detail: str = ""
    model: str = ""


def probe(port: int, timeout: float = 5.0) -> Answer:
    """Ask `http://127.0.0.1:port` who it is.

    `ready` takes a 200 from /health and a /v1/models list that only llama-server writes (server.cpp,
    `owned_by: llamacpp`), or its own refusal where it wants an API key, which the tunnel does not know
    (server-http.cpp, `authentication_error`). `timeout` seconds for each step.
    """
    try:
        status, body = _get(port, "/health", timeout)
        if status == 503 and "loading" in _error_text(body).lower():
            return Answer(LOADING, _error_text(body))
        if status != 200 or not isinstance(body, dict) or body.get("status") != "ok":
            return Answer(OTHER, f"/health answers {status}")
        return _identity(*_get(port, "/v1/models", timeout))
    except ConnectionRefusedError:
        return Answer(NOT_OPEN, "nothing listens on the local port")
    except TimeoutError:
        return Answer(SILENT, f"connected, and no answer within {timeout:g} s")
    except http.client.RemoteDisconnected:
        return Answer(CLOSED, "connected, and closed without an answer")
    except http.client.HTTPException as error:
        return Answer(OTHER, f"what answers does not speak HTTP ({type(error).__name__})")
    except OSError as error:
        return Answer(CLOSED, f"connected, and broken off ({error.strerror or error})")


def _identity(status: int, body: Any) -> Answer:
    if status == 401 and _error(body).get("type") == "authentication_error":
        return Answer(READY, "answers, and wants an API key")
    models = body.get("data") if isinstance(body, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    if status != 200 or not isinstance(first, dict) or first.get("owned_by") != "llamacpp":
        return Answer(OTHER, f"/health is fine, but /v1/models is not llama-server's (status {status})")
    return Answer(READY, "answers", str(first.get("id", "")))


def _get(port: int, path: str, timeout: float) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, _decoded(response.read(_LIMIT))
    finally:
        connection.close()


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _error(body: Any) -> dict[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _error_text(body: Any) -> str:
    return str(_error(body).get("message", ""))
