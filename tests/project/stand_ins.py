"""What makes the commands of the pages small enough to run."""

import shlex
from pathlib import Path

from commands import python

FEW = "bench.path=questions.jsonl max_new_tokens=6 warmup=1"

ONE = "adapter.exit_layers=[2]"

BRIEF = (
    "trainer.epochs=1 trainer.holdout=4 trainer.decode_prompts=2 trainer.decode_tokens=8 "
    "trainer.batch_tokens=256"
)

SHORT = (
    "data.shards=1 data.shard_size=12 data.max_question_tokens=8 data.max_answer_tokens=16 "
    "data.keep_unfinished_questions=true data.filters.max_repetition=1 "
    "data.filters.near_duplicate=1"
)

TUNED = (
    "tuning_questions=2 reporting_questions=2 max_new_tokens=8 search.kangaroo.steps=[6] "
    "search.kangaroo.threshold=[0.0] search.hybrid.nodes=[5] search.hybrid.min_gain_per_step=[1.5]"
)


def typed(script: str, options: str, where: Path) -> str:
    """What a command prints; it has to succeed."""
    done = python(script, *shlex.split(options), cwd=where)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
