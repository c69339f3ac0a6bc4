# Every target makes .venv on first use (needs Python 3.11+); the stamp makes later runs quick.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test slow check clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# workers wait for the processes of their tests, so that three fill two cores
SUITE := $(BIN)/python -m pytest -n 3 --dist loadfile

test: check
	$(SUITE)

slow: $(STAMP)  # all tests, then those that took longest, with what their fixtures took
	$(SUITE) --durations=30

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist partc.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
