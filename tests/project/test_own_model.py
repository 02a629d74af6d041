"""The commands of docs/your-own-model.md in their order, on a small random model of one's own."""

import json
from pathlib import Path

import pytest
from commands import BRIEF, FILES, ROOT, shown, typed
from helpers import random_model
from test_commands import TUNED

from kangaroo.__main__ import COMMANDS
from kangaroo.models.random_models import byte_tokenizer

PAGE = ROOT / "docs/your-own-model.md"
# What is appended to each command, so that it takes seconds.
SMALLER = {
    "scripts/prepare.py": "held=4",
    "evaluate.py": "max_new_tokens=6 warmup=1",
    "train.py": f"{BRIEF} {FILES} trainer.vocabulary=64",
    "scripts/tune.py": TUNED,
    # one asks at a terminal, the other never ends
    "scripts/chat.py": "--cfg job",
    "scripts/serve.py": "--cfg job",
}


@pytest.mark.slow
def test_the_commands_of_your_own_model_follow_from_each_other(tmp_path):
    random_model("llama", deep_scale=0.15).save_pretrained(tmp_path / "models/mine")
    byte_tokenizer().save_pretrained(tmp_path / "models/mine")
    questions = [{"category": "sums", "turns": [f"What is {i} and {i}?"]} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    lines = shown(PAGE, "python")
    assert len(lines) == 10
    for _, script, *options in lines:
        typed(script, *options, *SMALLER.get(script, "").split(), cwd=tmp_path)
    assert (tmp_path / "outputs/tune/mine/drafter/tuned.yaml").is_file()
    assert (tmp_path / "outputs/pack/USER/NAME/config.json").is_file()


def test_the_commands_of_your_own_model_are_known():
    for _, script, *options in shown(PAGE, "python"):
        action = [x for x in options[:1] if "=" not in x and not x.startswith("-")]
        assert " ".join([Path(script).stem, *action]) in COMMANDS
