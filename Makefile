# Set-up, build and tests of smp, each in one command; `make help` lists them. CMake does the building:
# this file installs what is missing and passes the choices on.

PRESET ?= release
PREFIX ?= /usr/local
PYTHON ?=
MPI    ?= $(if $(filter no-mpi,$(PRESET)),OFF,AUTO)
UNITY  ?=
ONLY   ?=
SECONDS ?= 60
TORCH  := 2.11.0
CLANG_FORMAT := 19.1.7
CLANG_TIDY := 19.1.0.1
TRANSFORMERS := 4.56.2
NBCLIENT := 0.11.0
IPYKERNEL := 7.4.0
ACCELERATE := 1.10.1
MYPY := 2.4.1

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# make splits at spaces, so no quoting here would be enough.
$(foreach name,CURDIR PYTHON,$(if $(word 2,$($(name))),$(error $(name): expected a path without spaces, got '$($(name))')))

build := $(CURDIR)/build/$(PRESET)
venv  := $(CURDIR)/.venv

# A compilation with torch/torch.h takes 1.3 GB. Memory is the smaller of the machine's and the container's.
jobs = $$(awk -v cores=$$(nproc) '$$1 == "MemTotal:" { kb = $$2 } FILENAME != "/proc/meminfo" && $$1 ~ /^[0-9]+$$/ && $$1 / 1024 < kb { kb = $$1 / 1024 } \
  END { jobs = int(kb / 1572864); print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo $$(ls /sys/fs/cgroup/memory.max 2>/dev/null))

ifeq ($(PYTHON),)
  python := $(venv)/bin/python
  environment := venv
else
  # Absolute, since cmake runs elsewhere; links are kept, since a virtual environment's python is one.
  python := $(abspath $(shell command -v $(PYTHON)))
  environment := python-given
endif

# Without MPI no test can be missing for want of it, so there SMP_CI has nothing to say.
options := -DSMP_PYTHON=$(python) -DSMP_WITH_MPI=$(MPI) $(if $(UNITY),-DSMP_UNITY_BUILD=$(UNITY)) \
  -DSMP_CI=$(if $(filter OFF,$(MPI)),OFF,$(if $(filter-out false 0,$(CI)),ON,OFF))

.PHONY: help packages venv digits transformers notebooks types python-given configure build demo demo-python formatter format linter tidy built-tests test test-long faults fuzz test-gpu bench peers install wheel clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo
	@echo "  Programs in build/<preset>/bin: transformer_lm, mnist, gan, variable_length (docs/examples.md);"
	@echo "  smp run -np 2 PROGRAM starts two processes"
	@echo "  PRESET=release|debug|asan|tsan|no-mpi   PYTHON=/path/to/python with its own torch   MPI=AUTO|ON|OFF"
	@echo "  UNITY=OFF compiles each file alone, for those who change files (docs/building.md)"
	@echo "  Each target first does what is missing: Debian packages, .venv with torch $(TORCH), configure, build."

packages:
	@cmake/debian_packages.sh $(if $(filter OFF,$(MPI)),--without-mpi) $(if $(PYTHON),--without-venv)

# The metadata folder is what pip writes last: it exists only after a complete installation. Nothing here runs torch's
# Python, so nothing compiles its 2,000 files.
has = compgen -G "$(venv)/lib/python3*/site-packages/$(1)dist-info/RECORD" >/dev/null
venv: packages
	@if ! $(call has,torch-$(TORCH)[.+]*); then \
	  echo "setup: torch $(TORCH) goes into $(venv); the download takes a minute or three"; \
	  [ -x $(venv)/bin/pip ] || python3 -m venv $(venv); \
	  $(venv)/bin/pip install --no-compile torch==$(TORCH); \
	fi

# For the digits of the mnist example only, so the build goes on without it.
digits: $(environment)
	@[ "$(environment)" = venv ] || exit 0; \
	if ! $(call has,scikit_learn-*); then \
	  echo "setup: scikit-learn goes into $(venv)"; \
	  $(venv)/bin/pip install --no-compile --retries 1 scikit-learn || echo "setup: going on without it; the mnist example has no data of its own" >&2; \
	fi

# A given interpreter is the user's: nothing is installed into it, nor beside it into an environment that PYTHON= is
# there to avoid. Without scikit-learn the build says what is missing for mnist, and goes on.
python-given: packages
	@[ -x "$(python)" ] || { echo "PYTHON: expected an interpreter that has torch, got '$(PYTHON)'" >&2; exit 2; }

# Configured again only when a choice has changed, or what the build can do without has come or gone; a
# changed CMakeLists.txt is the build's business.
configure: $(environment)
	@now="$(options) with $$({ command -v ccache mold mpicxx || true; } | xargs)"; \
	if [ ! -f $(build)/build.ninja ] || [ "$$(cat $(build)/options.txt 2>/dev/null)" != "$$now" ]; then \
	  echo "setup: configure build/$(PRESET)"; \
	  rm -f $(build)/options.txt; \
	  cmake --preset $(PRESET) $(options); \
	  echo "$$now" > $(build)/options.txt; \
	fi

build: digits configure  ## Everything, into build/<preset>/bin
	@echo "build: libraries, programs, tests and benchmarks, on $(jobs) cores"
	@cmake --build $(build) --target all smp_benchmarks --parallel $(jobs)
	@cat $(build)/torch_taken.txt

demo: configure  ## Build the library and the language model, and train it on two processes for two minutes
	@echo "build: the library, smp and transformer_lm, on $(jobs) cores; no tests and no benchmarks"
	@cmake --build $(build) --target smp_program transformer_lm --parallel $(jobs)
	@cat $(build)/torch_taken.txt
	@examples/transformer_lm/demo $(build) $(build)/demo

demo-python: digits configure  ## Build the Python package, and train on handwritten digits on two processes
	@echo "build: smp and the extension of the package, on $(jobs) cores; no tests and no benchmarks"
	@cmake --build $(build) --target smp_program smp_python --parallel $(jobs)
	@PYTHONPATH=$(build)/python $(build)/bin/smp run -np 2 $(python) examples/mnist_sagemaker/train.py

# $(call optional,distribution,version,what goes untested without it)
optional = if ! $(call has,$(1)-$(2).); then \
  echo "setup: $(1) $(2) goes into $(venv)"; \
  $(venv)/bin/pip install --no-compile --retries 1 $(1)==$(2) || echo "setup: going on without it; $(3) untested" >&2; \
fi

# For the tests of its models and its Trainer, and for benchmarks of its models.
transformers: $(environment)
	@[ "$(environment)" = venv ] || exit 0; \
	$(call optional,transformers,$(TRANSFORMERS),the models of transformers stay); \
	$(call optional,accelerate,$(ACCELERATE),the Trainer of transformers stays)

# For the tests of docs/notebooks only.
notebooks: $(environment)
	@[ "$(environment)" = venv ] || exit 0; \
	$(call optional,nbclient,$(NBCLIENT),the notebooks stay); \
	$(call optional,ipykernel,$(IPYKERNEL),the notebooks stay)

# For the test of the stubs only.
types: $(environment)
	@[ "$(environment)" = venv ] || exit 0; \
	$(call optional,mypy,$(MYPY),what type checkers see of the package stays)

# Beside every interpreter, since a given one gets nothing installed.
tool = if [ ! -x build/formatter/bin/$(1) ]; then \
  echo "setup: $(1) $(2) goes into build/formatter"; \
  python3 -m venv build/formatter; \
  build/formatter/bin/pip install --quiet $(1)==$(2); \
fi
formatter: $(environment)
	@$(call tool,clang-format,$(CLANG_FORMAT))
# Debian's is 14, which does not read <source_location> of g++ 12.
linter: $(environment)
	@$(call tool,clang-tidy,$(CLANG_TIDY))

format: formatter  ## Lay out all C++ files as the tests want them
	@find smp partitioner runtime tools examples benchmarks python_bindings tests -name '*.h' -o -name '*.cpp' | xargs build/formatter/bin/clang-format -i

# By the build's batches of files: the headers of a batch are read once.
tidy: linter  ## What the compiler does not see, in the library (.clang-tidy): ten minutes
	@cmake --preset tidy $(options) >/dev/null
	@sed -nE 's,^ *"file": "($(CURDIR)(/build/tidy)?/(smp|partitioner|runtime)/.*)".*,\1,p' build/tidy/compile_commands.json | \
	  xargs -n 1 -P $(jobs) build/formatter/bin/clang-tidy --quiet -p build/tidy --extra-arg=-Wno-unknown-warning-option

# Configured anew, since that measures how long tests may take on this machine as it now is.
built-tests: formatter digits transformers notebooks types configure
	@echo "build: libraries, programs and tests, on $(jobs) cores; no benchmarks"
	@cmake --build $(build) --parallel $(jobs)
	@cat $(build)/torch_taken.txt
	@cmake $(build) | grep 'time limits'

test: built-tests  ## The tests that the preset runs; they guard every promise
	@ctest --preset $(PRESET) --parallel $(jobs)

test-long: built-tests  ## What `make test` leaves out: whole sweeps, soaks, faults ten times over (docs/building.md)
	@ctest --preset $(PRESET)-long --parallel $(jobs)

faults: configure  ## Plant each fault of tests/faults into a copy of the library: does its test find it? Hours; ONLY=name
	@$(python) tests/faults/run.py $(build) $(ONLY)

fuzz:  ## Decoders of messages and files under libFuzzer, SECONDS=60 each; needs clang-16 and libclang-rt-16-dev
	@$(MAKE) configure PRESET=fuzz MPI=OFF
	@cmake --build build/fuzz --parallel $(jobs) --target fuzz
	@tests/fuzz/run.sh build/fuzz/bin/fuzz build/fuzz/corpus $(SECONDS) $(jobs)

test-gpu:  ## What one GPU can show; without one, builds it all and says what was not run
	@$(MAKE) configure PRESET=gpu MPI=OFF
	@cmake --build build/gpu --parallel $(jobs) --target gpu_loopback_test gpu_training_test gpu_oracle_test gpu_bodies_test gpu_layouts_test bench_gpu
	@tests/gpu/run.sh build/gpu $(python)

bench: build transformers  ## All measurements, or ONLY=name; "name value unit" each
	@benchmarks/run $(build)/benchmarks.txt $(ONLY)

peers: build transformers  ## Measure smp against torch.distributed.pipelining on six models, in C++ and in Python (docs/peers.md)
	$(python) benchmarks/peers/run.py $(build)/bin
	PYTHONPATH=$(build)/python $(python) benchmarks/peers/run.py $(build)/bin --python

install: build  ## Libraries, public headers, package files and bin/smp under PREFIX (default /usr/local)
	@cmake --install $(build) --prefix "$$(realpath -ms '$(PREFIX)')"

wheel: $(environment)  ## A wheel of the Python package for this Python and torch, in dist/
	@$(python) -m pip wheel --no-deps --wheel-dir dist --config-settings=cmake.define.SMP_WITH_MPI=$(MPI) .

clean:  ## Remove build/ and dist/ (.venv stays)
	rm -rf build dist
