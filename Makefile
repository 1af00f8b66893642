# `make run` is the main job, `make quick` and `make test` are the tests. The first call installs everything in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
ROOMS := agents buffers collectors columns distributed envs evaluation games learning samplers testing tools vector workers
SOURCES := $(shell find $(ROOMS) src \( -name '*.py' -o -name '*.[ch]' \) -not -path '*/.*' 2>/dev/null)
PYTEST := pytest --dist loadgroup
INSTALL = rm -rf build && $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation
TESTABLE := $(VENV)/.dependencies $(VENV)/.installed
STARTED := $(shell date +%s)
SECONDS_SO_FAR = $$(( $$(date +%s) - $(STARTED) ))

# Keep compiled test modules, even where this variable is set: otherwise each process compiles them again.
quick test portable: export PYTHONDONTWRITEBYTECODE =

.PHONY: run quick test portable check coverage floors pythons docs docs-test dist arm macos gpu bench sanitize ray chaos faults cases mutants real peers peers-docs scale clean

run: $(VENV)/.installed
	@echo "Training CartPole with PPO."
	$(BIN)/python examples/ppo.py --out runs/cartpole
	@echo "The report: returns, and the speed of this machine."
	$(BIN)/python benchmarks/report.py runs/cartpole
	@echo "make run took $(SECONDS_SO_FAR) s."

# What a developer runs all the time: every package with one start method, two cases of each test, in less than a minute.
quick: $(TESTABLE)
	$(BIN)/$(PYTEST) -n 2 -m "not slow"

# All tests, except those of the built site (`make docs-test`) and of a GPU (`make gpu`).
test: $(TESTABLE)
	@echo "Running the tests, some ten minutes with two CPUs."
	$(BIN)/$(PYTEST) -n 4 -m "not site and not gpu"
	@echo "make test took $(SECONDS_SO_FAR) s."

# The same tests with the code that macOS runs (src/penstock/system.py), in a Python without what only Linux has.
# To run a part of them: make portable PORTABLE_TESTS="tests/workers tests/games"
PORTABLE_TESTS ?=
portable: $(TESTABLE)
	PENSTOCK_PORTABLE=1 PYTHONPATH=$(CURDIR)/tests/without_linux $(BIN)/$(PYTEST) -n 4 -m "not site and not gpu" $(PORTABLE_TESTS)
	@echo "make portable took $(SECONDS_SO_FAR) s."

check: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/type_checks/surface.py tests/programs
	@if [ -x $(BIN)/pyright ]; then $(BIN)/pyright --pythonpath $(BIN)/python tests/type_checks/surface.py; fi
	$(BIN)/mypy --platform darwin
	$(BIN)/lint-imports

# The site in site/: open site/index.html. A warning, for example about a link without a target, is an error.
docs: $(VENV)/.dependencies
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

# The built site: its links, its reference, and how it looks in Chromium. Without Chromium, the tests that need it are
# skipped with the reason.
docs-test: $(TESTABLE)
	$(BIN)/pytest tests/docs/test_sources.py tests/docs/test_site.py tests/docs/test_browser.py

# An sdist, and wheels for x86_64 and aarch64, for each version of Python that is installed. Each wheel for this processor
# is installed in a new environment and tried. Where Python 3.14 is not installed: `.ci/python_of_debian 3.14 sid`.
DIST_PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
dist:
	PYTHON=$(PYTHON) .ci/dist $(DIST_PYTHONS)

# After `make dist`: the wheel for aarch64 in an emulator, and what orders memory in its machine code.
arm:
	.ci/arm 3.13 trixie

# The C code, compiled for macOS without a warning.
macos:
	PYTHON=$(PYTHON) .ci/macos

# The whole suite, that of Ray too, and the lines of each room that it runs, in whichever process. Fails below the share
# in pyproject.toml. A test with a limit of time may fail, since measured code is slower. Ray has processes of its own:
# it leaves threads, with which a process must not fork.
COVERAGE := .venv-ray/bin/coverage
coverage: .venv-ray/.installed
	rm -f .venv-ray/.coverage*
	-$(COVERAGE) run -m $(PYTEST) -n 3 -m "not ray and not gpu and not site"
	-$(COVERAGE) run -m $(RAY_TESTS)
	$(COVERAGE) combine --quiet
	@$(COVERAGE) report --skip-covered --show-missing --fail-under=0 > .venv-ray/coverage.txt
	@for room in $(ROOMS); do \
		printf '%-12s%6s %%\n' $$room "$$($(COVERAGE) report --include='*/site-packages/penstock/'$$room'/*' --format=total --fail-under=0)"; \
	done
	@echo ".venv-ray/coverage.txt has the lines that did not run"
	@$(COVERAGE) report --format=total

# Where there is a GPU: the tests that need it, and how long it takes to act there. Install a torch with CUDA first.
gpu: $(TESTABLE)
	$(BIN)/pytest -m gpu tests/samplers/test_central_device.py tests/agents/test_torch_agent.py
	$(BIN)/python benchmarks/gpu.py

bench: $(TESTABLE)
	$(BIN)/python benchmarks/throughput.py

# penstock and its peers in one run, in a virtual environment of their own. Takes some 35 minutes. To measure one work
# again: .venv-peers/bin/python benchmarks/peers.py pong --json .venv-peers/figures-pong.json, then make peers-report.
# A quick look, with no picture: .venv-peers/bin/python benchmarks/peers.py uneven pong --repeats 3
PEERS := .venv-peers
PEER_WORKS ?= random mlp pixels sleeping central short uneven pong
PEER_OPTIONS ?=
PEERS_RUN = $(PEERS)/bin/python benchmarks/peers.py
peers: $(PEERS)/.installed
	rm -f $(PEERS)/figures-*.json
	for work in $(PEER_WORKS); do \
		$(PEERS_RUN) $$work $(PEER_OPTIONS) --json $(PEERS)/figures-$$work.json > /dev/null || exit 1; \
	done
	$(MAKE) --no-print-directory peers-report

# From one worker to all CPUs, and from 16 sleeping workers to 512: the table, and the picture of docs/choosing.md.
scale: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/scale.py --json $(PEERS)/scale.json --picture docs/scale.svg

# The tables and the picture of the last `make peers`.
peers-report:
	$(PEERS_RUN) --report $(PEER_WORKS:%=$(PEERS)/figures-%.json) --skipped $(PEERS)/skipped.txt --picture docs/peers.svg

# A peer must not change the versions that penstock runs with. One that needs others is skipped, with pip's reason.
# Sample Factory needs gymnasium < 1, so it has a virtual environment of its own.
$(PEERS)/.dependencies: setup.py constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) -c constraints.txt torch
	rm -rf build
	$(PEERS)/bin/python $(PIP) -c constraints.txt setuptools wheel ".[bench]"
	$(PEERS)/bin/python -m pip freeze | grep -E '^(torch|numpy|gymnasium)==' > $(PEERS)/pins.txt
	: > $(PEERS)/skipped.txt
	grep -v '^#' benchmarks/peers.txt | while read -r peer; do \
		$(PEERS)/bin/python $(PIP) -c $(PEERS)/pins.txt $$peer > $(PEERS)/pip.txt 2>&1 || \
			echo "$$peer: $$(grep -oE '([A-Za-z.]+Error|ERROR): .*' $(PEERS)/pip.txt | tail -1)" >> $(PEERS)/skipped.txt; \
	done
	$(PYTHON) -m venv $(PEERS)/sample-factory
	$(PEERS)/sample-factory/bin/python $(PIP) -c constraints.txt torch "sample-factory>=2.1" > $(PEERS)/pip.txt 2>&1 || \
		echo "sample-factory: $$(grep ERROR $(PEERS)/pip.txt | tail -1)" >> $(PEERS)/skipped.txt
	touch $@

$(PEERS)/.installed: $(PEERS)/.dependencies $(SOURCES)
	rm -rf build
	$(PEERS)/bin/python $(PIP) --no-deps --no-build-isolation --force-reinstall .
	touch $@

# The names of other libraries in docs/migration and the code there, each with its library.
PEER_PAGES ?= torchrl tianshou skrl sb3 sample_factory rllib pufferlib
peers-docs: $(TESTABLE)
	PYTHON=$(PYTHON) .ci/peers_docs $(PEER_PAGES)

# torch first, under its pin: otherwise pip would fetch gigabytes of another build.
$(VENV)/.basics: setup.py constraints.txt
	@echo "Installing torch into $(VENV): some 200 MB to fetch, only once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch numpy setuptools wheel
	touch $@

# The tests and `make run` use the package as it is built and installed, not the checkout.
$(VENV)/.installed: $(VENV)/.basics $(SOURCES) pyproject.toml README.md
	@echo "Building penstock, and installing it with what it needs: half a minute at first, later some seconds."
	$(INSTALL) --quiet ".[bench]"
	@echo "Installed after $(SECONDS_SO_FAR) s: $$(du -sm $(VENV) | cut -f1) MB in $(VENV)."
	touch $@

# What the tests use besides.
$(VENV)/.dependencies: $(VENV)/.basics
	@echo "Installing environments, game engines and other libraries for the tests: some 2 GB, minutes, only once."
	$(INSTALL) ".[dev]"
	@echo "Installed after $(SECONDS_SO_FAR) s: $$(du -sm $(VENV) | cut -f1) MB in $(VENV)."
	touch $@ $(VENV)/.installed

# Tests of the compiled parts, built with AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZED := build/sanitized
UNDER_ASAN = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	PYTHONPATH=$(SANITIZED)/lib $(BIN)/python
sanitize: $(VENV)/.dependencies
	rm -rf $(SANITIZED)
	CFLAGS="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	$(UNDER_ASAN) -c "from penstock.buffers import _native; assert 'sanitized' in _native.__file__"
	$(UNDER_ASAN) -m pytest \
		tests/agents/test_distributions.py tests/buffers/test_native.py tests/buffers/test_compiled.py \
		tests/workers/test_native.py tests/collectors/test_native.py \
		tests/collectors/test_step_into.py tests/envs/test_wrappers.py tests/learning/test_sum_tree.py \
		tests/learning/test_transitions.py tests/samplers/test_native_or_not.py

# `make quick` with the lowest versions that setup.py allows. torch stays at its pin: its floor has no small build.
floors:
	.ci/versions floors

# The tests that need no torch, with each of these versions of Python that is installed. -floors: with the lowest versions;
# mujoco: the tests of MuJoCo with its newest version.
PYTHONS ?= 3.10 3.10-floors 3.12 3.13 3.14 mujoco
pythons:
	.ci/versions $(PYTHONS)

# The tests of Ray, which `make test` skips: Ray is large, so it has a virtual environment of its own. With
# PENSTOCK_FAULTS=full they run at full scale.
RAY := .venv-ray
RAY_TESTS := pytest -m ray tests/distributed tests/benchmarks/test_cluster.py tests/process/test_faults.py
ray: $(RAY)/.installed
	$(RAY)/bin/$(RAY_TESTS)

$(RAY)/.installed: setup.py constraints.txt $(SOURCES)
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(PIP) -c constraints.txt torch
	rm -rf build
	$(RAY)/bin/python $(PIP) -c constraints.txt setuptools wheel ".[dev,cluster]"
	touch $@

chaos: $(TESTABLE)
	$(BIN)/python benchmarks/chaos.py --seconds 600

# The failure tests at full scale, with many more trials each; takes some 90 minutes. No traceback after 100 s: Python
# prints it without stopping the thread that it describes, and the process can crash on the way.
FULL_SCALE = PENSTOCK_FAULTS=full $(BIN)/$(PYTEST) -n 3 -o faulthandler_timeout=0
faults: $(TESTABLE)
	$(FULL_SCALE) tests/process

# The other tests at full scale: every case of each matrix.
cases: $(TESTABLE)
	$(FULL_SCALE) tests --ignore=tests/process

# Plants the faults of tests/mutants.txt in copies, one after the other, and says which of them no test notices. To try
# some: make mutants FAULTS="buffers/ games/"
FAULTS ?=
mutants: $(TESTABLE)
	$(BIN)/python tests/mutants.py $(FAULTS)

# Real environments, as many as are installed, at 20,000 steps each.
real: $(TESTABLE)
	PENSTOCK_REAL_STEPS=20000 $(BIN)/pytest -n 2 tests/real/test_long.py

clean:
	rm -rf $(VENV) $(PEERS) $(RAY) .pythons build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
