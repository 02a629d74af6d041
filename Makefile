# Needs Python (3.10 or newer), git and make; everything else is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, for instance an index with CPU builds of PyTorch.
PIP_ARGS ?=
# More arguments for the command that a target runs: make test ARGS="-k tree"
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo chat serve load train tune speed soak paper test test-slow test-quantized test-llama test-vllm \
  check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## install what development needs into .venv; other targets install what they use

install = $(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".$(if $(1),[$(1)])"
# The stamp of an extra that `setup` installs, too: after `setup` nothing is left to do.
needs = $(or $(wildcard $(STAMP)),$(STAMP)-$(1))

BASE := $(call needs,base)  # without an extra

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,dev)
	@touch $@

$(STAMP)-base: pyproject.toml constraints.txt | $(BIN)/python
	$(call install)
	@touch $@

$(STAMP)-%: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$*)
	@touch $@

# The fastest drafter, shown beside Kangaroo and vanilla.
FASTEST = hybrid
demo: $(BASE)  ## the demo questions by each method, and their speeds compared
	$(BIN)/python evaluate.py model=smollm2-135m drafter=kangaroo \
	  +drafter@more.$(FASTEST)=$(FASTEST) bench=demo question_every=2 max_new_tokens=128 hf_every=10 \
	  warmup=1 output=outputs/demo $(ARGS)

chat: $(BASE)  ## talk to the model in the terminal
	$(BIN)/python scripts/chat.py $(ARGS)

serve: $(BASE) $(call needs,serve)  ## answer requests of OpenAI's API on port 8000
	$(BIN)/python scripts/serve.py $(ARGS)

load: $(BASE) $(STAMP)-load  ## measure servers of four drafters by how many ask at the same time
	$(BIN)/python integrations/load_test/load_test.py $(ARGS)

train: $(BASE)  ## train an adapter for SmolLM2-135M
	$(BIN)/python train.py model=smollm2-135m $(ARGS)

tune: $(BASE)  ## find the fastest drafter for SmolLM2-135M, and its settings
	$(BIN)/python scripts/tune.py $(ARGS)

speed: $(BASE)  ## time the engine's steps
	$(BIN)/python scripts/speed.py $(ARGS)

# make soak SOAK_TOKENS=100000 SOAK_SEED=1 SOAK_OUTPUT=outputs/soak-1
soak: $(call needs,test)  ## decode a million tokens by every drafter, and compare all with vanilla's
	$(BIN)/python -m pytest -q -s -m soak tests/soak $(ARGS)

# The experiments of the paper, for the embedded model; docs/results/paper.md names them. A run that was stopped goes on.
PAPER = table1 adapter_ablation parameters exit_layer threshold steps position tree temperature
PAPER_TRAINING = model.dtype=float32 data.teacher=32 data.shards=2 trainer.epochs=1 trainer.vocabulary=8192
paper: $(BASE)  ## measure the paper's experiments, and write them into docs/results/paper.md
	@# first what needs no training: questions that are not there are missed at once
	$(BIN)/python evaluate.py experiment=paper/table1 $(ARGS)
	$(BIN)/python train.py experiment=paper/adapters $(PAPER_TRAINING)
	for name in $(filter-out table1,$(PAPER)); do \
	  $(BIN)/python evaluate.py experiment=paper/$$name $(ARGS) || exit 1; \
	done
	$(BIN)/python evaluate.py results=outputs/paper/smollm2-135m page=docs/results/paper.md

# Two workers with one thread each (tests/conftest.py).
test: $(call needs,test)  ## run the CPU tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=10 -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP)-slow  ## run the slow tests
	$(BIN)/python -m pytest -q --durations=10 -m slow $(ARGS)

# Where torchao is installed it warns whenever transformers is imported, so it lies beside the environment.
test-quantized: $(call needs,test)  ## run the tests of quantized weights
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --upgrade --target build/quantized -c constraints.txt torchao compressed-tensors
	PYTHONPATH=build/quantized $(BIN)/python -m pytest -q tests/models/test_families.py -m "slow or not slow" -k "quantized or saved_and_drafts" $(ARGS)

test-llama: $(call needs,test) $(STAMP)-benchmark  ## run the tests of integrations/llama_cpp
	$(BIN)/python -m pytest -q integrations/llama_cpp $(ARGS)

# vLLM has a virtual environment of its own (3.8 GB): it needs other versions than we do.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
# make test-vllm VLLM=0.33.0: a release without a CPU wheel (integrations/vllm/overlay.py)
VLLM ?= 0.32.0
VLLM_OVERLAY := $(if $(filter-out 0.32.0,$(VLLM)),$(VLLM_VENV)/vllm-$(VLLM))

test-vllm: $(VLLM_STAMP) $(VLLM_OVERLAY)  ## run the tests of the vLLM plugin, in .venv-vllm
	PYTHONPATH=$(abspath $(VLLM_OVERLAY)) VLLM_TARGET_DEVICE=cpu \
	  $(VLLM_BIN)/python -m pytest -q --durations=10 integrations/vllm $(ARGS)

$(VLLM_VENV)/vllm-%: $(VLLM_STAMP)
	$(VLLM_BIN)/python integrations/vllm/overlay.py $* $@ $(PIP_ARGS)

$(VLLM_STAMP): integrations/vllm/requirements.txt integrations/vllm/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) torch==2.13.0
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps -r integrations/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e integrations/vllm
	@touch $@

check: setup  ## format, lint, types and fast tests: what a change has to pass
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) test
	$(MAKE) test-quantized

format: setup  ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove .venv, .venv-vllm and everything that tools leave behind
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
