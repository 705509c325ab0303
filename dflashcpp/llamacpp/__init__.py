"""llama.cpp: which one, what we change in it, and building it."""

from dflashcpp.llamacpp.building import Intent, build, build_ggml_base, intent
from dflashcpp.llamacpp.builds import Build, find_build
from dflashcpp.llamacpp.recipe import DEFAULT_TARGETS

__all__ = ["DEFAULT_TARGETS", "Build", "Intent", "build", "build_ggml_base", "find_build", "intent"]
