# Everything runs in .venv, which the first target sets up by itself. Needs Python >= 3.11, a C++17 compiler and make.
PYTHON ?= python3
VENV := .venv
FRAMEWORKS := .venv-frameworks
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TORCH := $(shell sed -n 's/^torch==//p' .ci/constraints.txt)
# Programs of .venv, cmake and ninja among them, come before the system's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Each module is compiled to bytecode once, for the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
STEP := .ci/step
# The one tree of objects: the extension, the C++ library that tests install from it, the emulated GPU.
BUILD := build/native
# The CUDA code: on, off, or auto (if nvcc is found). nvcc takes as long as all else together, so that it is left out
# where no GPU is found; `make cuda` compiles it there.
AFFLUX_CUDA ?= $(if $(wildcard /dev/nvidia0 /dev/dxg),auto,off)
# Test files by their names without test_, in whatever folder under tests/.
files = $(foreach name,$(1),$(shell find tests -name 'test_$(name).py'))
# Formulas, orders of sums, rules and what a server decides; no processes, stores or simulations.
CORE := ops stages types codecs elementary composed coded_rounds by_hand rules rules_contract configuration parts \
  limits identities dialects exact_path passes streaming server mutants
GPU_TESTS := $(call files,cuda gpu_server gpu_rows gpu_clients bench_cuda)
# Modules that plugins of pytest and scripts import.
HELPERS := tests:tests/oracle:tests/support:tests/gpu:tests/soak
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Experiments on top of the simulator, and the tables of papers.
LAB := python/afflux/lab python/afflux/cli/lab bench/papers tests/lab tests/papers
# In a process of their own: a cluster has token authentication, which Ray reads when it is first imported.
RAY_TESTS := tests/integrations/test_ray_plane.py
GPU_CHECKED := 2049 or parts or finite or lent or trees or noise
FORMATTED := $(shell find engine csrc bench tests examples -name '*.[hc]' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help lists setup engine cuda lint-now demo check test test-lab soak lint types core docs unit sanitize sanitize-thread sanitize-address sanitize-all test-gpu gpu bench pythons wheels check-macos versions release-check mutants same-runs kills hostile scale fuzz long frameworks test-peers bench-peers test-integrations soak-integrations format update-constraints clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: engine $(VENV)/.dev  ## a virtual environment with afflux and its development tools

$(VENV)/.tools: .ci/constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "afflux needs Python 3.11 or newer: make PYTHON=python3.11"'
	@$(PYTHON) -m venv $(VENV)
	@$(STEP) -q "installing the build tools" \
	  $(PIP) install -c .ci/constraints.txt scikit-build-core setuptools pybind11 cmake ninja
	@touch $@

engine: $(VENV)/.tools  ## compiles what has changed of engine/ and csrc/, into build/native, and installs the extension
	@[ -f $(BUILD)/build.ninja ] || echo "== compiling the engine, about a minute on two cores (CUDA code: $(AFFLUX_CUDA))"
	@cmake -S . -B $(BUILD) -G Ninja --log-level=WARNING -DAFFLUX_PYTHON=ON -DAFFLUX_CUDA=$(AFFLUX_CUDA) \
	  -DCMAKE_COMPILE_WARNING_AS_ERROR=$(if $(CI),ON,OFF) \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_INSTALL_PREFIX=$(CURDIR)/python/afflux -DCMAKE_INSTALL_MESSAGE=LAZY
	@cmake --build $(BUILD)
	@cmake --install $(BUILD) >/dev/null
	@cmake --install $(BUILD) --prefix $(BUILD)/package >/dev/null

$(VENV)/.torch: $(VENV)/.tools
	@$(STEP) -q "installing torch, the CPU build if pip's index has it" \
	  sh -c "$(PIP) install -c .ci/constraints.txt 'torch==$(TORCH)+cpu' || true"
	@$(PIP) show -q torch 2>/dev/null || \
	  echo "pip's index has no CPU build of torch: taking its default build, on Linux several GB with CUDA"
	@touch $@

INSTALL = AFFLUX_BUILT=$(CURDIR)/$(BUILD)/package \
  $(STEP) -q "installing the packages of '.[$(1)]'" \
  $(PIP) install --no-build-isolation -c .ci/constraints.txt --editable '.[$(1)]'

$(VENV)/.lab: $(VENV)/.torch | engine
	@$(call INSTALL,lab)
	@touch $@

$(VENV)/.dev: $(VENV)/.torch | engine
	@$(call INSTALL,dev)
	@touch $(VENV)/.lab $@

# With WHEELS, the folder of `make wheels`, the demo has an environment of its own, and nothing is compiled.
.venv-wheel/.lab: $(wildcard $(WHEELS)/*.whl)
	@$(PYTHON) -m venv .venv-wheel
	@$(STEP) -q "installing torch, the CPU build if pip's index has it" \
	  sh -c ".venv-wheel/bin/python -m pip install -c .ci/constraints.txt 'torch==$(TORCH)+cpu' || true"
	@$(STEP) -q "installing afflux[lab] from $(WHEELS)" .venv-wheel/bin/python -m pip install --only-binary afflux \
	  -c .ci/constraints.txt --find-links $(WHEELS) 'afflux[lab]==$(VERSION)'
	@touch $@

demo: $(if $(WHEELS),.venv-wheel/.lab,engine $(VENV)/.lab)  ## a rule of each paper on handwritten digits, and a run that is killed and resumed; WHEELS=dist: from a wheel
	$(if $(WHEELS),.venv-wheel/bin,$(BIN))/afflux demo

check: setup lint types core  ## lint, types, and the tests that a wrong formula fails: two minutes

test: setup  ## lint, types, the suite without that of `test-lab`, a part of it under sanitizers
	@rm -f build/seconds.txt
	@$(MAKE) --no-print-directory lint types unit sanitize
	@echo "== the seconds of make test by part"
	@cat build/seconds.txt

soak: setup long kills fuzz hostile sanitize-all mutants soak-integrations  ## hours: storms of interrupts, kills, faults at each call, hostile calls and stores, full products, mutants

lint: setup
	@$(STEP) "checking style and imports" $(MAKE) --no-print-directory lint-now

lint-now:
	ruff check .
	ruff format --check .
	codespell *.md .ci bench csrc cuda13 docs engine examples python tests Makefile pyproject.toml
	@clang-format --dry-run --Werror $(FORMATTED)
	PYTHONPATH=python:. lint-imports --no-logo
	@python .ci/rooms
	@python .ci/names
	@python .ci/lists --check

types: setup
	@$(STEP) -q "checking types" mypy

core: setup
	$(PYTEST) -q $(call files,$(CORE))
	$(PYTEST) -q $(call files,bits) -k 'earlier or instruction'

unit: setup
	@$(STEP) "running the tests" $(PYTEST) --doctest-modules --ignore=python/afflux/integrations \
	  $(addprefix --ignore=,$(LAB)) python/afflux tests

test-lab: setup  ## the tests of the laboratory and of the papers' tables, which `make test` leaves out
	@$(STEP) "running the tests of the laboratory" $(PYTEST) --doctest-modules $(LAB)

long: setup scale
	$(PYTEST) -m soak tests
	AFFLUX_STRESS=100000 $(PYTEST) $(call files,stress)

# Both at once: each compiles on all cores, but runs its tests in one process.
sanitize: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line sanitize-thread sanitize-address

sanitize-thread sanitize-address:
	@$(STEP) "running tests under the $(@:sanitize-%=%) sanitizer" \
	  $(BIN)/python $(shell find tests -name sanitize.py) $(@:sanitize-%=%) --short

sanitize-all: setup  ## most of the suite under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python $(shell find tests -name sanitize.py) thread
	$(BIN)/python $(shell find tests -name sanitize.py) address

# The C++ library alone, without Python, and for one instruction set.
cuda: setup  ## compiles the CUDA code, where nvcc is installed, and checks its machine code
	@if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then \
	  echo "skipped: nvcc is not installed, so the CUDA code was not compiled"; exit 0; fi; \
	echo "== compiling the CUDA code, about a minute on two cores"; \
	cmake -S . -B build/cuda -G Ninja --log-level=WARNING -DAFFLUX_CUDA=on -DAFFLUX_ISAS=baseline \
	  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && cmake --build build/cuda && $(BIN)/python -m pytest -m nvcc tests/gpu/test_nvcc.py

test-gpu: setup  ## the tests on a GPU, then memory and race checkers over some of them
	$(BIN)/python -m pytest -rs $(GPU_TESTS)
	AFFLUX_ARRAYS=torch PYTHONPATH=$(HELPERS) $(BIN)/python -m pytest -p gpu_servers \
	  $(call files,server step rules store store_errors)
	AFFLUX_ARRAYS=torch AFFLUX_ROWS_ON=host PYTHONPATH=$(HELPERS) $(BIN)/python -m pytest -p gpu_servers $(call files,log)
	set -e; for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
	  $(BIN)/python -m pytest $(GPU_TESTS) -k '$(GPU_CHECKED)'; done

# With the Python, compiler, CMake and libraries of a machine that has no network.
gpu:  ## builds, tests and measures on a bare machine with a GPU, and prints a short table last
	PYTHON=$(PYTHON) TESTS='$(GPU_TESTS)' CHECKED='$(GPU_CHECKED)' .ci/gpu

bench: setup  ## the micro-benchmarks against torch and this machine's own bandwidth
	$(BIN)/python -m bench

docs: setup  ## the documentation as a site: build/docs/index.html
	PYTHONPATH=python $(BIN)/python -m sphinx --fail-on-warning --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

mutants: setup  ## breaks formulas on purpose, one at a time, and checks that the suite notices
	$(BIN)/python $(shell find tests -name mutants.py)

same-runs: setup  ## runs the same commands with this tree and with the commit BASE, and compares every bit: three minutes
	@[ -n "$(BASE)" ] || { echo "say with which commit to compare: make same-runs BASE=COMMIT"; exit 2; }
	$(BIN)/python $(shell find tests -name same_runs.py) $(BASE)

lists: setup  ## writes the lists of presets into README, docs and CITATION.cff
	$(BIN)/python .ci/lists

pythons:  ## unpacks Debian's Pythons, those for ARM with qemu-user, into build/pythons, for `wheels` and `versions`; on Debian
	.ci/pythons

wheels:  ## the wheels for Linux, x86-64 and ARM, into dist, by ziglang's compiler; PYTHONS names interpreters or folders of headers; CUDA=13: that of afflux-cuda13; minutes
	$(PYTHON) .ci/wheels $(if $(CUDA),--cuda $(CUDA),$(PYTHONS))

check-macos:  ## compiles the engine and the bindings for macOS, by ziglang's compiler; makes no wheel
	$(PYTHON) .ci/wheels --macos

versions: $(VENV)/.tools  ## tests the wheels in dist with the lowest and the newest dependencies, on each Python that is here
	@$(PIP) install -q uv
	$(BIN)/python .ci/versions $(PYTHONS)

release-check:  ## what of a release needs no service: wheels, sdist, a typed program, extras, version; half an hour
	PYTHON=$(PYTHON) PYTHONS="$(PYTHONS)" .ci/release-check

kills: setup  ## kills a store's process 2,000 times; goes on where it was stopped
	$(BIN)/python $(shell find tests -name crashes.py) 2000 build/kills.json

hostile: setup  ## opens 5,000 damaged or made-up stores; goes on where it was stopped
	$(BIN)/python $(shell find tests -name hostile_stores.py) 5000 build/hostile.json

fuzz: setup  ## a million hostile calls of the Python API, and a million of the C++ API under sanitizers
	$(BIN)/python $(shell find tests -name fuzz.py) 1000000
	cmake -S $(shell find tests -type d -name engine_fuzz) -B build/fuzz -DAFFLUX=$(CURDIR)
	cmake --build build/fuzz --parallel 2
	build/fuzz/engine_fuzz 1000000 0

scale: setup  ## 20,000 of a million clients push into stores on disk: 2 GB in the system's temporary folder, minutes
	AFFLUX_TOUCHED=20000 $(BIN)/python -m pytest -q $(call files,store_scale)

# afflux itself is the one that `setup` has built. APPFL, FedLab, FLGo and fluke have many dependencies that are not
# imported here.
$(FRAMEWORKS)/.installed: .ci/frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	@echo "installing torch, Flower, NVFlare, APPFL, FLGo, pfl, FedLab and fluke: some minutes, without output"
	$(FRAMEWORKS)/bin/python -m pip install --quiet -r .ci/frameworks.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps appfl==1.12.0 fedlab==1.3.0 flgo==0.4.4 fluke-fl==0.8.1 \
	  opacus==1.6.0
	touch $@

frameworks: setup $(FRAMEWORKS)/.installed  ## an environment with Flower, NVFlare, APPFL, FLGo, pfl, FedLab and fluke

test-integrations: frameworks  ## the adapters, in the drivers of their own frameworks; W&B and MLflow
	PYTHONPATH=$(CURDIR)/python $(FRAMEWORKS)/bin/python -m pytest -n 2 --dist worksteal tests/integrations --ignore $(RAY_TESTS)
	PYTHONPATH=$(CURDIR)/python AFFLUX_RAY=needed $(FRAMEWORKS)/bin/python -m pytest $(RAY_TESTS)

# The oldest flwr that the adapter supports, before the newest one, which `frameworks` has.
$(FRAMEWORKS)/flwr-1.41: | frameworks
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps --target $@ flwr==1.41.0

soak-integrations: frameworks $(FRAMEWORKS)/flwr-1.41  ## the adapters over processes of their own, which are killed, and Flower's with an older flwr: minutes
	PYTHONPATH=$(CURDIR)/python $(FRAMEWORKS)/bin/python -m pytest -m soak tests/integrations --ignore $(RAY_TESTS)
	PYTHONPATH=$(CURDIR)/python AFFLUX_RAY=needed $(FRAMEWORKS)/bin/python -m pytest -m soak $(RAY_TESTS)
	PYTHONPATH=$(CURDIR)/$(FRAMEWORKS)/flwr-1.41:$(CURDIR)/python AFFLUX_FLWR=1.41 $(FRAMEWORKS)/bin/python -m pytest \
	  -m 'soak or not soak' tests/integrations/test_flower_*.py

test-peers: frameworks  ## compares the dialects of FedBuff, and the benchmark's peers, with these frameworks' own code
	PYTHONPATH=$(CURDIR)/python $(FRAMEWORKS)/bin/python -m pytest tests/peers $(call files,bench_peers)

bench-peers: frameworks  ## the benchmark's rows against these frameworks, one by one: together they need 25 GB
	set -e; for row in peers-native peers-flat peers-adam peers-small from-models adapters simulators; do \
	  PYTHONPATH=$(CURDIR)/python $(FRAMEWORKS)/bin/python -m bench --rows $$row; done

format: setup  ## formats Python and C++
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(FORMATTED)

update-constraints: setup  ## writes the versions in .venv to .ci/constraints.txt
	set -e; { sed -n '/^#/p' .ci/constraints.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu//'; } > .ci/constraints.new
	mv .ci/constraints.new .ci/constraints.txt

clean:  ## removes what was built
	rm -rf $(VENV) .venv-wheel $(FRAMEWORKS) build dist runs python/afflux/*.so python/afflux/cmake python/afflux/include python/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
