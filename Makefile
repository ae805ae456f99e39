# Every target sets up what it needs on a machine that has python3, pip and make; the second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USABLE := $(VENV)/.usable
READY := $(VENV)/.ready
SITE := $(VENV)/.site
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
# Where .ci/locks has hashes for this Python, every file but torch itself is taken by its hash; elsewhere the newest that fits.
LOCKED := $(shell $(PYTHON) -c "import sys; print(sys.platform == 'linux' and sys.version_info[:2] in ((3, 11), (3, 12)))")

.PHONY: demo test test-landing test-all test-matrix test-wheel lint bench bench-peers docs site dist browser clean
# Where bytecode is forbidden, each of hundreds of processes would compile the sources, and pytest rewrite every test, anew.
PYTEST := $(BIN)/python -m compileall -q src/nanny; PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

# What a user has: nanny and what it needs, without the tools of its developers.
$(USABLE): pyproject.toml .ci/locks/use.txt
	@echo "setting up $(VENV): torch last, which is large ..."
	@$(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),True)
	@$(PIP) --no-deps --require-hashes -r .ci/locks/use.txt
else
	@$(PIP) hatchling editables
endif
	@echo "... torch"
	@$(PIP) $(TORCH)
	@$(PIP) --no-build-isolation -e '.[card,fix]'
	@$(BIN)/python -m compileall -q src/nanny || true
	@touch $(USABLE)

$(READY): $(USABLE) .ci/locks/dev.txt
	@echo "... and the tools of its developers"
ifeq ($(LOCKED),True)
	@$(PIP) --no-deps --require-hashes -r .ci/locks/dev.txt
endif
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(READY)

$(SITE): $(USABLE)
	@$(PIP) mkdocs-material==9.8.1
	@touch $(SITE)

demo: $(USABLE)
	@$(BIN)/nanny demo

test: $(READY) browser
	$(PYTEST)

test-landing: $(READY) browser
	$(PYTEST) -m 'not slow'

test-all: $(READY) browser
	$(PYTEST) -m 'slow or not slow'

# Other versions of torch and Python: downloads several GB the first time, so no part of CI.
test-matrix:
	.ci/matrix

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) browser
	$(BIN)/python -m benchmarks --write

# nanny beside what else can be installed: what each sees, false alarms, cost.
bench-peers: $(READY)
	$(BIN)/python -m benchmarks.peers --write

# Wheel and sdist; the same bytes from the same commit.
dist: $(USABLE)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build -c

# The wheel in an empty environment, without extras: every command works or names its extra.
test-wheel: dist
	.ci/wheel $(PYTHON)

browser:
	@.ci/chromium

docs: $(READY)
	$(BIN)/python docs/generate.py

# The pages of docs/, README and the causes, as HTML in build/site.
site: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist demo nanny_logs .mypy_cache .pytest_cache .ruff_cache .hypothesis
