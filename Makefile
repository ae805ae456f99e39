# Every target sets up what it needs on a machine that has python3, pip and make; the second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-matrix lint bench docs browser clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m compileall -q src/nanny || true
	touch $(READY)

demo: $(READY)
	$(BIN)/nanny demo

test: $(READY) browser
	$(BIN)/pytest

test-all: $(READY) browser
	$(BIN)/pytest -m 'slow or not slow'

# Other versions of torch and Python: downloads several GB the first time, so no part of CI.
test-matrix:
	.ci/matrix

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) browser
	$(BIN)/python -m benchmarks

browser:
	@.ci/chromium

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist demo nanny_logs .mypy_cache .pytest_cache .ruff_cache .hypothesis
