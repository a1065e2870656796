# Set-up, build and tests of smp, each in one command; `make help` lists them. CMake does the building:
# this file installs what is missing and passes the choices on.

PRESET ?= release
PREFIX ?= /usr/local
PYTHON ?=
MPI    ?= AUTO
ONLY   ?=
TORCH  := 2.11.0

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

options := -DSMP_PYTHON=$(python) -DSMP_WITH_MPI=$(MPI) -DSMP_CI=$(if $(filter-out false 0,$(CI)),ON,OFF)

.PHONY: help packages venv python-given configure build demo test bench peers install clean

help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo
	@echo "  Programs in build/<preset>/bin: transformer_lm, mnist, gan, variable_length (docs/examples.md);"
	@echo "  smp run -np 2 PROGRAM starts two processes"
	@echo "  PRESET=release|debug|asan   PYTHON=/path/to/python with its own torch   MPI=AUTO|ON|OFF"
	@echo "  Each target first does what is missing: Debian packages, .venv with torch $(TORCH), configure, build."

packages:
	@cmake/debian_packages.sh $(if $(filter OFF,$(MPI)),--without-mpi) $(if $(PYTHON),--without-venv)

# The metadata folder is what pip writes last: it exists only after a complete installation. scikit-learn is for the
# digits of the mnist example only, so the build goes on without it.
has = compgen -G "$(venv)/lib/python3*/site-packages/$(1)dist-info/RECORD" >/dev/null
venv: packages
	@if ! $(call has,torch-$(TORCH)[.+]*); then \
	  echo "setup: torch $(TORCH) goes into $(venv)"; \
	  [ -x $(venv)/bin/pip ] || python3 -m venv $(venv); \
	  $(venv)/bin/pip install torch==$(TORCH); \
	fi
	@if ! $(call has,scikit_learn-*); then \
	  echo "setup: scikit-learn goes into $(venv)"; \
	  $(venv)/bin/pip install --retries 1 scikit-learn || echo "setup: going on without it; the mnist example has no data of its own" >&2; \
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
	  rm -f $(build)/options.txt; \
	  cmake --preset $(PRESET) $(options); \
	  echo "$$now" > $(build)/options.txt; \
	fi

build: configure  ## Everything, into build/<preset>/bin
	@cmake --build $(build) --parallel $(jobs)
	@cat $(build)/torch_taken.txt

demo: build  ## Train the language model on two processes, about two minutes
	@if grep -q '^MPI$$' $(build)/transports.txt; then \
	  $(build)/bin/smp run -np 2 $(build)/bin/transformer_lm; \
	else \
	  echo "demo: no MPI here, so one process"; $(build)/bin/transformer_lm; \
	fi

test: build  ## All tests
	@ctest --preset $(PRESET) --parallel $(jobs)

bench: build  ## All measurements, or ONLY=name; "name value unit" each
	@benchmarks/run $(build)/benchmarks.txt $(ONLY)

peers: build  ## Measure smp against torch.distributed.pipelining on six models (docs/peers.md)
	$(python) benchmarks/peers/run.py $(build)/bin

install: build  ## Libraries, public headers, package files and bin/smp under PREFIX (default /usr/local)
	@cmake --install $(build) --prefix "$$(realpath -ms '$(PREFIX)')"

clean:  ## Remove build/ (.venv stays)
	rm -rf build
