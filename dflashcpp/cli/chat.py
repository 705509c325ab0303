"""`dflashcpp chat`: one question or a conversation, streamed, ending with a line of statistics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashcpp.cli import _remote
from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output
from dflashcpp.errors import UsageError

if TYPE_CHECKING:
    from dflashcpp.client import Client
    from dflashcpp.stream import Answer


def chat(
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="The question; without it, a prompt.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="The server [default: the one of ours that runs].")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Or ours on this port.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="At most so many.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "--temp", min=0, help="0 is greedy [default: the server's]."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="For a repeatable answer.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file whose first line is the key.")
    ] = None,
    ssh: _remote.SshOption = None,
    remote_port: _remote.RemotePortOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a llama-server and stream its answer. Text that is piped in is the question, or is put after it."""
    output = Output(as_json=as_json)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in options.items() if value is not None}
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    question = _question(text)
    if question is None and as_json:
        raise UsageError("--json needs a question", hint="dflashcpp chat --json TEXT")
    if sum(where is not None for where in (url, port, ssh)) > 1:
        raise UsageError("give one of --url, --port and --ssh")
    if ssh is None:
        _chat(output, _client(url, api_key_file, port), messages, question, options)
        return
    profile, reached = _remote.reach(ssh, ssh_option, ssh_config)
    with _remote.tunnelled(output, profile, reached, remote_port) as near:
        _chat(output, _client(near, _remote.key_file(api_key_file, profile)), messages, question, options)


def _chat(
    output: Output,
    client: Client,
    messages: list[dict[str, Any]],
    question: str | None,
    options: dict[str, Any],
) -> None:
    if question is None:
        _converse(output, client, messages, options)
        return
    answer = _ask(output, client, [*messages, {"role": "user", "content": question}], options)
    if output.as_json:
        output.result(_data(answer))


def _client(url: str | None, key_file: Path | None, port: int | None = None) -> Client:
    from dflashcpp.client import Client
    from dflashcpp.server import registry
    from dflashcpp.server.launch import read_api_key

    if url is None:
        return registry.only(port).client()
    return Client(url, read_api_key(key_file))


def _question(text: str | None) -> str | None:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    whole = "\n\n".join(part for part in (text, piped) if part)
    if whole:
        return whole
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    raise UsageError("there is no question", hint="dflashcpp chat TEXT, or pipe the text in")


def _ask(output: Output, client: Client, messages: list[dict[str, Any]], options: dict[str, Any]) -> Answer:
    """Stream one answer; its statistics go to stderr. Ctrl-C ends the generation, too."""
    from dflashcpp.stats import summary

    stream = client.chat(messages, True, **options)
    thinking = False
    try:
        for piece in stream:
            if piece.reasoning and not output.as_json:
                output.aside(piece.reasoning)
                thinking = True
            if piece.text and thinking:
                output.aside("\n")
                thinking = False
            output.stream(piece.text)
    except KeyboardInterrupt:
        output.stream("\n")
        stream.cancel()
        raise
    output.stream("\n")
    answer = stream.answer
    output.status(summary(answer.timings))
    return answer


def _converse(
    output: Output, client: Client, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    output.status("a question a line; Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _ask(output, client, messages, options)
        except KeyboardInterrupt:
            output.status("stopped")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})


def _data(answer: Answer) -> dict[str, Any]:
    timings = answer.timings
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": list(answer.tool_calls),
        "finish_reason": answer.finish_reason,
        "timings": timings.as_json() if timings else None,
        "mean_accepted_length": timings.mean_accepted_length if timings else None,
    }
