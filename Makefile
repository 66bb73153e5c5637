# `make demo` and `make test` set everything up by themselves; nothing else is needed on a fresh machine.
#   PYTHON=python3.12    another interpreter, 3.11 or newer
#   TORCH_INDEX=URL      another index for torch alone, such as https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-full check clean

help:
	@echo "make demo       set up, then race plain against drafted decoding (the models are in the repository)"
	@echo "make test       set up, then the short test suite (under 10 minutes on 2 cores)"
	@echo "make test-full  set up, then every long proof; resumes where it was stopped"
	@echo "make check      set up, then lint, types, sizes and import order"
	@echo "make clean      remove the environment and everything generated"

demo: $(STAMP)
	@scripts/demo

test: $(STAMP)
	@scripts/test

test-full: $(STAMP)
	@scripts/test-full

check: $(STAMP)
	@scripts/check

# Done once, and again when what is to be installed has changed. torch comes first: from its own index if asked.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "forerun needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV): torch, forerun and its tools (1-2 minutes and a download, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .proofs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
