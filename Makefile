# Everything from a fresh checkout: `make demo` shows it, `make test` checks it, `make install` sets up development.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core
DEV    := $(VENV)/.dev
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test install system schemas format bench clean

demo: $(CORE)
	$(BIN)/backbeat demo

test: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q

install: $(DEV)

# Debian packages that the browser and lab tests use where they are present. Optional: those tests are skipped without.
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 chromium >/dev/null; \
	else echo "make system: needs root and apt-get; skipped, the tests that need these packages will say so"; fi

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "backbeat needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(CORE): $(VENV)/.python pyproject.toml
	$(PIP) -e .
	@touch $@

$(DEV): $(CORE) constraints.txt
	$(PIP) -c constraints.txt -e '.[torch,lab,test]'
	@touch $@

schemas: $(CORE)
	$(BIN)/python -m backbeat.model.schemas

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
