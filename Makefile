# Thin: every line calls the tool. Only relative paths, so that a checkout may live in a folder with spaces.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
PYTEST_FLAGS ?=

.PHONY: help demo test test-bases test-deep test-fast lint build bench docs docs-check patches-check wheel clean
help:
	@echo "make demo           the main job, from nothing, on the built-in pair (the first run takes some minutes)"
	@echo "make test           the whole test suite"
	@echo "make test-bases     the tests on the further llama.cpp bases, each of which is built first"
	@echo "make test-deep      a sanitized llama-server in conversation, llama.cpp's own tests; compiles for half an hour"
	@echo "make test-fast      the tests that need neither a built llama.cpp nor minutes"
	@echo "make lint           ruff and mypy"
	@echo "make build          fetch, patch and build llama.cpp for the CPU"
	@echo "make patches-check  validate every patch series without building"
	@echo "make docs           write docs/cli.md anew;  make docs-check fails when it is stale"
	@echo "make bench          the side-by-side measurements of benchmarks/"
	@echo "make wheel          a wheel in dist/"

demo: .venv/installed
	$(PY) -m dflashcpp demo

test: .venv/installed-test
	$(PY) -m pytest -m "not bases and not deep" $(PYTEST_FLAGS)

test-bases: .venv/installed-test
	$(PY) -m pytest -m bases $(PYTEST_FLAGS)

test-deep: .venv/installed-test
	$(PY) -m pytest -m deep $(PYTEST_FLAGS)

test-fast: .venv/installed-test
	$(PY) -m pytest -m "not real and not slow and not bases and not deep" $(PYTEST_FLAGS)

lint: .venv/installed-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

build: .venv/installed
	$(PY) -m dflashcpp build

patches-check: .venv/installed
	$(PY) -m dflashcpp patches --check

docs: .venv/installed
	$(PY) docs/generate.py

docs-check: .venv/installed
	$(PY) docs/generate.py --check

bench: .venv/installed-test
	$(PY) -m dflashcpp build
	$(PY) -m dflashcpp build --no-patches
	$(PY) -m benchmarks.draft_buffer
	$(PY) -m benchmarks.memory
	-$(PY) -m benchmarks.drafting --quick
	$(PY) -m benchmarks.soak --seconds 300 --tunnel
	@echo "benchmarks/convert.py needs 15 GB and a Python with transformers; its first lines say how to run it"

wheel: .venv/installed-test
	$(PY) -m build --wheel

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "dflashcpp needs Python 3.11 or newer; '$(PYTHON)' is not. Say which with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# The version of the environment is that of pyproject.toml: change it and the next make installs anew.
.venv/installed: pyproject.toml | .venv/bin/python
	$(PIP) install --editable .
	@touch $@

.venv/installed-test: pyproject.toml .venv/installed
	$(PIP) install --editable '.[test]'
	@touch $@

.venv/installed-lint: pyproject.toml .venv/installed
	$(PIP) install --editable '.[lint]'
	@touch $@
