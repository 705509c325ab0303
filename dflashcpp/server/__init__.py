"""Running llama-server: argv, process, readiness, logs, and what its failures mean."""

from dflashcpp.server.llama_server import (
    Engine,
    LlamaServer,
    find_engine,
    pair_launch,
    prepare,
    spare_threads,
)

__all__ = ["Engine", "LlamaServer", "find_engine", "pair_launch", "prepare", "spare_threads"]
