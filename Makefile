# Everything from a fresh checkout: `make demo` shows it, `make check`, `make test` and `make test-long` check it,
# `make docs` builds its documentation, `make install` sets up development.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core
DEV    := $(VENV)/.dev
PYTEST := $(BIN)/python -m pytest -q
# One worker more than cores: many tests wait for processes, timeouts or slow links.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 6))')
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Hundreds of processes import the package: it is compiled once, also where the environment asks for no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check lint lint-ruff lint-types lint-layers test test-long docs install system schemas format bench clean

demo: $(CORE)
	$(BIN)/backbeat demo

# The loop while working: the linters, and the tests of the core. They need neither torch nor ranks, and the searches
# of memory and sharded plans, which take longest, are left to `make test`.
QUICK  := model cost engine steps planners
check: lint
	$(PYTEST) $(SPREAD) -m "not long" --ignore-glob='*/test_memory_*' --ignore-glob='*/test_sharded*' tests/test_units.py tests/test_layers.py tests/cli \
	  $(QUICK:%=tests/%) $(QUICK:%=backbeat/%)

# Tests marked `alone` compare measured times: they run by themselves, after the rest.
test: lint
	$(PYTEST) $(SPREAD) -m "not alone and not long"
	$(PYTEST) -m "alone and not long" $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

# The judge, whose tables go to a file, and slow matrices, of which `make test` runs a sample. Where there are none,
# pytest ends with 5.
JUDGED := build/judge.md
test-long: $(DEV)
	@mkdir -p $(dir $(JUDGED))
	$(BIN)/python validation/judge.py > $(JUDGED) || { cat $(JUDGED); exit 1; }
	@tail -n 2 $(JUDGED)
	$(PYTEST) $(SPREAD) -m long || [ $$? -eq 5 ]

# All at once, and to the end, whichever fails: each keeps one core busy.
lint: $(DEV)
	@$(MAKE) --no-print-directory -j 3 -k lint-ruff lint-types lint-layers

lint-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types:
	$(BIN)/mypy

lint-layers:
	$(BIN)/lint-imports

# The site. -n -W: a link, an anchor or a reference that leads nowhere is an error.
docs: $(DEV)
	$(BIN)/python -m sphinx -E -n -W --keep-going -q -c docs . build/docs
	@echo "build/docs/docs/index.html"

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

# Those that need neither a GPU nor root, nor more than a minute or two; the docstring of each other says how to run it.
bench: $(DEV)
	for name in help predict plan sharded serve topk_select compressed_launches; do \
	  echo "benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 1 benchmarks/runtime_overhead.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
