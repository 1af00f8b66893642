# Two commands: `make run` (the main job) and `make test`. Each sets itself up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find buffers workers ports envs agents collectors samplers vector testing src \( -name '*.py' -o -name '*.[ch]' \) -not -path '*/.*' 2>/dev/null)

.PHONY: run test check bench sanitize chaos faults clean

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

# Tests of the compiled part, built with AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZED := build/sanitized
UNDER_ASAN = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	PYTHONPATH=$(SANITIZED)/lib $(BIN)/python
sanitize: $(VENV)/.dependencies
	rm -rf $(SANITIZED)
	CFLAGS="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	$(UNDER_ASAN) -c "from penstock.buffers import _native; assert 'sanitized' in _native.__file__"
	$(UNDER_ASAN) -m pytest \
		tests/buffers/test_native.py tests/collectors/test_native.py tests/samplers/test_native_or_not.py

chaos: $(VENV)/.installed
	$(BIN)/python benchmarks/chaos.py --seconds 600

# The fault-injection suite with the numbers of trials that it was designed for; takes about an hour.
faults: $(VENV)/.installed
	PENSTOCK_FAULTS=full $(BIN)/pytest tests/process

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
