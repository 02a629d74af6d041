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
.PHONY: help setup demo chat serve load train curve tune speed soak estimate paper test test-slow check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## install the project and its tools into .venv

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

# The fastest drafter, shown beside Kangaroo and vanilla.
FASTEST = hybrid
demo: setup  ## decode the demo questions with each method and compare the speeds
	$(BIN)/python evaluate.py model=smollm2-135m drafter=kangaroo \
	  +drafter@more.$(FASTEST)=$(FASTEST) bench=demo max_new_tokens=32 hf_every=20 warmup=1 \
	  output=outputs/demo $(ARGS)

chat: setup  ## talk to the model in the terminal
	$(BIN)/python scripts/chat.py $(ARGS)

serve: setup  ## answer requests of OpenAI's API on port 8000
	$(BIN)/python scripts/serve.py $(ARGS)

load: setup  ## measure servers of four drafters by how many ask at the same time
	$(BIN)/python scripts/load.py $(ARGS)

train: setup  ## train an adapter for SmolLM2-135M
	$(BIN)/python train.py model=smollm2-135m $(ARGS)

# Questions that the target answers: a file in ShareGPT or chat form, or an id on the hub (docs/data.md).
QUESTIONS ?= questions.jsonl
curve: setup  ## train on more and more answers to QUESTIONS=, and say what still more would bring
	$(BIN)/python scripts/split.py $(QUESTIONS) outputs/questions
	$(BIN)/python train.py experiment=learning_curve data.source=outputs/questions/training.jsonl $(ARGS)
	$(BIN)/python scripts/learning_curve.py runs=outputs/learning_curve/smollm2-135m \
	  bench.path=outputs/questions/held_out.jsonl bench.name=held_out

tune: setup  ## find the fastest drafter for SmolLM2-135M, and its settings
	$(BIN)/python scripts/tune.py $(ARGS)

speed: setup  ## time the engine's steps
	$(BIN)/python scripts/speed.py $(ARGS)

soak: setup  ## decode a million tokens by every drafter, and compare all with vanilla's
	$(BIN)/python scripts/soak.py $(ARGS)

TABLE = outputs/estimate.md
ESTIMATE = $(BIN)/python scripts/estimate.py estimate.table=$(TABLE) $(ARGS)
estimate: setup  ## write the table of what each training takes (outputs/estimate.md)
	rm -f $(TABLE)
	for name in vicuna-7b vicuna-13b vicuna-33b llama-3.1-8b; do \
	  $(ESTIMATE) model=$$name || exit 1; \
	done
	for name in ours-7b smollm2; do \
	  $(ESTIMATE) experiment=$$name estimate.name=$$name || exit 1; \
	done

# The experiments of the paper, for the embedded model; docs/paper.md names them. A run that was stopped goes on.
PAPER = table1 adapter_ablation parameters exit_layer threshold steps position tree temperature
PAPER_TRAINING = data.shards=2 trainer.epochs=1 trainer.vocabulary=8192 trainer.decode_prompts=0
paper: setup  ## measure the paper's experiments, and write them into docs/paper.md
	$(BIN)/python train.py experiment=paper/adapters $(PAPER_TRAINING)
	for name in $(PAPER); do \
	  $(BIN)/python evaluate.py experiment=paper/$$name $(ARGS) || exit 1; \
	done
	$(BIN)/python scripts/paper.py outputs/paper/smollm2-135m docs/paper.md

# Two workers with one thread each (tests/conftest.py).
test: setup  ## run the CPU tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=10 -m "not slow and not gpu" $(ARGS)

test-slow: setup  ## run the slow tests
	$(BIN)/python -m pytest -q --durations=10 -m slow $(ARGS)

check: setup  ## format, lint, types and fast tests: what a change has to pass
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) test

format: setup  ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
