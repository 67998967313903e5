# slime: the two commands are `make quickstart` and `make test`; both set everything up in .venv first.
PYTHON ?= python3
SETUP_FLAGS ?=
QUICKSTART_FLAGS ?=
PYTEST_FLAGS ?=
BIN := .venv/bin

# A run has ten processes: without bytecode files each of them compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test unit soak lint format docs clean

help:  ## show this help
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## install everything into .venv (returns at once when nothing changed)
	@$(PYTHON) tools/setup.py $(SETUP_FLAGS)

quickstart: setup  ## train a tiny model from nothing: SFT, then GRPO through the real loop
	@$(BIN)/python -m examples.quickstart.run $(QUICKSTART_FLAGS)

test: lint docs  ## what CI runs: lint, docs, unit and integration tests
	$(BIN)/python -m pytest -m "not soak" --durations-file=build/durations-test.txt $(PYTEST_FLAGS)

unit: setup  ## the quick unit tests (under 3 minutes)
	$(BIN)/python -m pytest tests/unit -m "not soak and not slow" --durations-file=build/durations-unit.txt $(PYTEST_FLAGS)

soak: setup  ## full counts, seeds and timings, GPU tests where there is a GPU: the parts that have not passed, or PART="A B"
	@PYTEST_FLAGS="$(PYTEST_FLAGS)" $(BIN)/python -m tools.soak $(PART)

lint: setup  ## ruff, mypy, import layers, a report of sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.code_metrics

format: setup  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## check the documentation: links, generated pages
	$(BIN)/python -m tools.check_docs

clean:  ## remove caches and build results (not .venv, not runs)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
