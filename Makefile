# Every target makes .venv on first use; the stamp makes later runs quick. It is written last, so
# that an install that was interrupted, or is of another pyproject.toml, goes on at the next run.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do \
	$$each -c "$(NEW_ENOUGH)" 2> /dev/null && echo $$each && break; done)
BIN := .venv/bin
STAMP := .venv/installed
NO_PYTHON = .venv: cannot be made by $(or $(PYTHON),python3) (partc needs Python 3.11 or newer; without PYTHON, \
python3.11, python3.12, python3.13 and python3 are tried). Install one of them, or name yours: \
make PYTHON=/path/to/python

.PHONY: demo train test exhaustive slow check clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

train: $(STAMP)  # a run's whole life: ranks are killed, one is lost, and transformers reads what was learned
	$(BIN)/python examples/life.py

# workers wait for the processes of their tests, so that three fill two cores; conftest.py has the order
SUITE := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: check
	$(SUITE)

exhaustive: check  # with all rows of costly tests: behind a change of what many rooms read, and before a release
	$(SUITE) --exhaustive

slow: $(STAMP)  # the same tests, then those that took longest, with what their fixtures took
	$(SUITE) --durations=30

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c "$(NEW_ENOUGH)" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist partc.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
