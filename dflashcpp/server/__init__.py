"""Running llama-server: argv, process, readiness, logs, and what its failures mean."""

from dflashcpp.server.diagnose import Diagnosis, diagnose
from dflashcpp.server.llama_server import Engine, LlamaServer, find_engine, pair_launch, prepare

__all__ = ["Diagnosis", "Engine", "LlamaServer", "diagnose", "find_engine", "pair_launch", "prepare"]
