"""Every `torchrun` line of README and docs runs as a user types it, in two processes."""

from __future__ import annotations

# What stands in for a cluster and for a large target, in every line. (A recipe is its model's own.)
REPLACED = {
    "--nproc-per-node=8": "--nproc-per-node=2",
    "--nproc-per-node=4": "--nproc-per-node=2",
    "model=vicuna-7b": "model=tiny",
    "model=vicuna-33b": "model=tiny",
}
# The same on nodes: two of them, of one process each.
REPLACED_ON_NODES = REPLACED | {
    "--nnodes=4": "--nnodes=2",
    "--nproc-per-node=8": "--nproc-per-node=1",
}

SMALL = (
    "adapter.exit_layers=[2] trainer.epochs=1 trainer.holdout=4 trainer.decode_prompts=2 "
    "trainer.batch_tokens=256"
)
SHAREGPT = f"data.source=ShareGPT.json {SMALL}"
WRITTEN = (
    f"{SMALL} data.shard_size=8 data.max_question_tokens=8 data.max_answer_tokens=16 "
    "data.keep_unfinished_questions=true"
)
ASKED = "bench.path=questions.jsonl drafter.adapter=adapter max_new_tokens=6 warmup=1"

# What is appended to each line; a line that is not here fails.
APPENDED = {
    "train.py model=vicuna-7b": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-7b data.source=ShareGPT.json": f"recipe=vicuna-7b {SMALL}",
    "train.py model=vicuna-7b trainer.accumulate=32": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-7b trainer=deepspeed": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-33b trainer.shard_target=true": f"recipe=vicuna-33b {SHAREGPT}",
    "scripts/make_data.py model=vicuna-7b recipe=own_text": WRITTEN,
    "evaluate.py bench=spec_bench": f"model=tiny {ASKED}",
    "evaluate.py model=vicuna-7b bench=spec_bench": ASKED,
}
# Three Python processes with all imports take half a minute: one line is enough for every change.
FAST = "train.py model=vicuna-7b"


# Commands that one process does, with an action where it has several.
ALONE = [
    *("chat", "speed", "convert import", "convert export"),
    *("prepare datastore", "prepare layers"),
]
