# Two commands: `make run` (the main job) and `make test`. Each sets itself up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find buffers workers ports envs agents collectors samplers vector testing src \( -name '*.py' -o -name '*.[ch]' \) -not -path '*/.*' 2>/dev/null)

.PHONY: run test check bench chaos faults clean

run: $(VENV)/.installed
	$(BIN)/python examples/ppo.py --out runs/cartpole
	$(BIN)/python benchmarks/report.py runs/cartpole

test: $(VENV)/.installed
	$(BIN)/pytest -n 3 --dist loadgroup

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/throughput.py

# torch first, under its pin: resolving it later would fetch gigabytes of another build.
$(VENV)/.dependencies: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt ".[dev]"
	touch $@

# The tests run against the package as it is built and installed, not against the checkout.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES) pyproject.toml README.md
	rm -rf build
	$(PIP) --no-deps --no-build-isolation --force-reinstall .
	touch $@

chaos: $(VENV)/.installed
	$(BIN)/python benchmarks/chaos.py --seconds 600

# The fault-injection suite with the numbers of trials that it was designed for; takes about an hour.
faults: $(VENV)/.installed
	PENSTOCK_FAULTS=full $(BIN)/pytest tests/process

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
