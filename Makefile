SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -ra

.PHONY: help setup up down status test itest e2e chaos bench fmt lint type gen check-gen isolation images test-compose lock

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## Create .venv and install everything, once (2 GB, some minutes); then it only checks
	@deploy/setup.sh

up: setup ## Start everything and stay until Ctrl-C
	@exec $(BIN)/shoal up

down: ## Stop what `make up` started
	@$(BIN)/shoal down

status: ## Show what runs, its memory and restarts
	@$(BIN)/shoal status

test: setup ## Unit, repository and quick integration tests; the SDKs and recorded agents on a scripted engine
	$(PYTEST) libs services tests/repo tests/integration tests/conformance -m "not engine and not chaos"

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

images: ## Build every image and show its size; needs Docker with Compose, nothing of .venv
	@.ci/images

test-compose: setup ## Build the images and run the tests of `docker compose`; needs Docker, or a script that starts it
	@.ci/docker
	@.ci/images
	$(PYTEST) tests/compose --timeout 600

lock: ## Write constraints.txt from a fresh venv with everything in it
	.ci/lock
