# Every target makes .venv on first use (needs Python 3.11+); the stamp makes later runs quick.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test check clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: check  # workers wait for the processes of their tests, so that three fill two cores
	$(BIN)/python -m pytest -n 3 --dist loadfile

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
