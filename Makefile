# Every target sets up what it needs. PYTHON picks the interpreter (3.11 or later) that makes .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test tiny lint type bench docs clean

help: ## Shows the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fckpt needs Python 3.11 or later; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch optree
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## Makes .venv with everything that the other targets use

demo: setup ## Trains Hugging Face models within a byte budget, beside plain and a checkpoint per block: peak, time, bits
	$(BIN)/python -m benches demo

test: setup ## Runs all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

tiny: setup ## Runs a two-second smoke test
	$(BIN)/python -m pytest -q tests/test_tiny.py

lint: setup ## Checks style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## Checks types
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: setup ## Measures overhead against torch.utils.checkpoint; writes benches/results
	$(BIN)/python -m benches overhead --json benches/results/overhead-cpu.json

docs: setup ## Builds the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## Removes .venv and everything built
	rm -rf .venv site dist build .pytest_cache .ruff_cache .hypothesis
