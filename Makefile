# `make demo` and `make test` set everything up by themselves; nothing else is needed on a fresh machine.
#   PYTHON=python3.12    another interpreter, 3.11 or newer
#   TORCH_INDEX=URL      another index for torch alone. On Linux torch brings CUDA, several gigabytes; without a GPU
#                        give TORCH_INDEX=https://download.pytorch.org/whl/cpu, or the index you install torch from

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
RUNTIME := $(VENV)/.runtime
SERVER := $(VENV)/.server
TOOLS := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo serve test test-full check wheel clean

help:
	@echo "make demo       set up, fetch a chat model (98 MB, once), then race plain against drafted decoding with it"
	@echo "make serve      set up, then serve that model on this machine, with a page for the browser"
	@echo "make test       set up, then the short test suite (under 6 minutes on 2 cores)"
	@echo "make test-full  set up, then every long proof; resumes where it was stopped"
	@echo "make check      set up, then lint, types, sizes and import order"
	@echo "make wheel      build dist/*.whl, which needs no compiler where it is installed (CXX names the one used here)"
	@echo "make clean      remove the environment and everything generated"

demo: $(RUNTIME)
	@scripts/demo
	@echo
	@echo "make serve: the same model as a server, with a page that shows every token's origin, at http://127.0.0.1:8000/"

serve: $(SERVER)
	@scripts/serve

test: $(TOOLS)
	@scripts/test

test-full: $(TOOLS)
	@scripts/test-full

check: $(TOOLS)
	@scripts/check

wheel:
	@PYTHON=$(PYTHON) scripts/wheel

# Done once, and again when what is to be installed has changed. torch comes first: from its own index if asked. What
# tests and checks need besides is installed when the first of them is run.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "forerun needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV): torch and forerun (1-2 minutes and a download, once) ..."
	@$(if $(TORCH_INDEX),:,[ "$$(uname)" != Linux ] || echo "torch for Linux brings CUDA; TORCH_INDEX=https://download.pytorch.org/whl/cpu is smaller.")
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) -e .
	@touch $@

$(SERVER): $(RUNTIME)
	@echo "Installing what the server needs into $(VENV) ..."
	@$(PIP) -e '.[serve,grammar]'
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "Installing what tests and checks need into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .proofs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
