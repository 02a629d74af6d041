"""What Spec-Bench's own report does with answer files, written anew from what it is known to do.

Source: Xia et al. 2024 and its evaluation/speed.py and evaluation/equal.py, as described in
docs/evaluation.md; nothing is copied.
"""

import json

import numpy as np

MT_BENCH = [
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def choices(file, task):
    """Of the answers to a task's questions, or to all."""
    asked = MT_BENCH if task == "mt_bench" else [task]
    return [
        line["choices"][0] for line in lines(file) if task == "overall" or line["category"] in asked
    ]


def spec_bench_report(answers, baseline, tokenizer, task="overall"):
    """Speedup, and mean accepted tokens: a ratio of mean tokens/s, in which the baseline's tokens
    are its text tokenised again, less the BOS; and the mean of all entries of `accept_lengths`.
    """
    speeds, accepted, baseline_speeds = [], [], []
    for choice in choices(answers, task):
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        accepted.extend(choice["accept_lengths"])
    for choice in choices(baseline, task):
        tokens = sum(len(tokenizer(text).input_ids) - 1 for text in choice["turns"])
        baseline_speeds.append(tokens / sum(choice["wall_time"]))
    return np.mean(speeds) / np.mean(baseline_speeds), np.mean(accepted)


def spec_bench_equal(answers, baseline):
    """Whether all texts are the baseline's, by position in the file."""
    pairs = zip(choices(answers, "overall"), choices(baseline, "overall"), strict=True)
    return all(a["turns"] == b["turns"] for a, b in pairs)
