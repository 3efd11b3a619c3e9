# `make demo` and `make test` are all a new machine needs. Every recipe is what CI calls too.
.DEFAULT_GOAL := help
PY := .venv/bin/python
STAMP := .venv/.installed

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): deploy/requirements-cpu.lock deploy/setup.sh pyproject.toml
	@bash deploy/setup.sh .venv
	@touch $@

setup: $(STAMP) ## make .venv with the pinned CPU set

demo: $(STAMP) ## the main job, small, on CPU with real models and engines
	$(PY) -m shared.cli.main run deploy/config/demo.yaml

test: $(STAMP) ## all tests that need no GPU
	$(PY) -m pytest -q -p no:cacheprovider tests/unit tests/contract tests/sim
	$(PY) -m pytest -q -p no:cacheprovider tests/integration

check: $(STAMP) lint types ## lint, types, layers, unit and contract tests
	$(PY) -m pytest -q -x tests/unit tests/contract tests/sim

fmt: $(STAMP) ## format
	.venv/bin/ruff format . && .venv/bin/ruff check --fix .

lint: $(STAMP) ## ruff and the layer rules
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/lint-imports

types: $(STAMP) ## mypy, strict on shared and services
	.venv/bin/mypy

up: ## docker compose up
	docker compose up --build -d

down: ## docker compose down; the run stays on its volume
	docker compose down

test-compose: $(STAMP) ## the compose file on a Docker engine, about ten minutes
	$(PY) -m pytest -q tests/compose

clean: ## remove the environment, runs and caches
	rm -rf .venv runs .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help setup demo test check fmt lint types up down test-compose clean
