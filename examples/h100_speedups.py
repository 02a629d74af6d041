"""What would be fastest for Vicuna-7B on an H100, by arithmetic: python examples/h100_speedups.py

Accepted tokens are the Kangaroo paper's (arXiv 2404.18911, table 1: tokens a round and speedup of
six tasks). What it does not have is taken from SmolLM2-135M on Spec-Bench: how many more tokens a
round than the chain the same engine gets there, by task. Milliseconds are those of one H100 at 7B's
shape; beyond 16 nodes the sketch's are taken to grow as the measured ones do.
"""

import json
from pathlib import Path

import numpy as np

TASKS = ["translation", "qa", "summarization", "math_reasoning", "rag", "mt_bench"]
# Of the paper: tokens a round, and speedup on its machine, by task.
CHAIN = [1.41, 1.87, 1.87, 2.14, 2.05, 2.22], [1.24, 1.43, 1.50, 1.61, 1.52, 1.68]
TREE = [1.76, 2.32, 2.31, 2.76, 2.37, 2.67], [1.43, 1.71, 1.68, 2.04, 1.75, 1.93]
MEDUSA_TREE = [2.12, 2.08, 2.01, 2.48, 2.09, 2.51]
# Of its chains of 6 tokens on all tasks, by threshold; of one that never stops, 2.30 tokens in
# 2.30 / 1.21 = 1.90 vanilla steps, which is 6 draft tokens and a verification of 1.05.
BY_THRESHOLD = {0: (2.30, 1.21), 0.3: (2.22, 1.41), 0.5: (2.11, 1.46), 0.6: (2.06, 1.50)}
BY_THRESHOLD |= {0.7: (1.99, 1.48), 0.9: (1.83, 1.41)}
VERIFICATION, DRAFT_TOKEN = 1.05, (2.30 / 1.21 - 1.05) / 6

ADAPTER, HEADS = 0.043, 0.38  # ms to read 67 M weights, and Medusa's 591 M, at 3.09 TB/s
# What ms were measured: a vanilla token; a draft token; nodes and verifying them; a round's rest.
COSTS = {
    "measured (docs/results/gpu.md)": (
        (5.62, 0.66, 0.24),
        ([1, 8, 16, 32, 64], [4.86, 4.95, 5.14, 5.57, 7.79]),
    ),
    "a sketch of the kernels": (
        (5.09, 0.42 + ADAPTER, 0.0),
        ([1, 16, 32, 64], [5.09, 5.25, 5.69, 7.96]),
    ),
}


def measured(file: str) -> dict[str, dict]:
    """What an evaluation says of each method."""
    results = json.loads((Path(__file__).parents[1] / "docs/results" / file).read_text())
    return {method["name"]: method for method in results["methods"]}


def rates(method: dict) -> np.ndarray:
    """Tokens a round, by task."""
    return np.array([method["by_task"][task]["compression_rate"] for task in TASKS])


def drafted(method: dict) -> float:
    """Draft tokens a round."""
    counts = method["overall"]["speculative_decoding"]
    return counts["num_draft_tokens"] / counts["num_spec_steps"]


shipped, study = measured("spec_bench_zen4.json"), measured("adapters.json")
tokens, speedups = map(np.array, CHAIN)
# The draft tokens of a chain's round, from what a round took on the paper's machine.
steps = (tokens / speedups - VERIFICATION) / DRAFT_TOKEN
levels = (np.array(TREE[0]) / TREE[1] - VERIFICATION) / DRAFT_TOKEN
longer = drafted(shipped["fused"]) / drafted(shipped["kangaroo"])


def like(method: dict, chain: dict, of_chain: np.ndarray = tokens) -> np.ndarray:
    """Tokens a round of a method that the paper does not have, by those of SmolLM2's chain."""
    return 1 + (of_chain - 1) * (rates(method) - 1) / (rates(chain) - 1)


# The paper's chain by task if it never stopped: six tokens, as a block has.
unstopped = 1 + (tokens - 1) * (BY_THRESHOLD[0][0] - 1) / (BY_THRESHOLD[0.6][0] - 1)


# By method: tokens a round, draft tokens or levels, nodes verified, and ms that only it takes.
METHODS = {
    "Kangaroo's chain, threshold 0.6": (tokens, steps, steps, 0.0),
    "Kangaroo's tree": (np.array(TREE[0]), levels, 32, 0.0),
    "a fused adapter's chain": (
        like(shipped["fused"], shipped["kangaroo"]),
        steps * longer,
        steps * longer,
        2 * ADAPTER,
    ),
    "a fused adapter's tree": (
        like(shipped["fused_tree"], shipped["kangaroo"]),
        levels,
        32,
        2 * ADAPTER,
    ),
    "hybrid, fused adapter": (
        like(shipped["fused_hybrid"], shipped["kangaroo"]),
        steps * longer,
        drafted(shipped["fused_hybrid"]),
        2 * ADAPTER,
    ),
    "a block of one pass": (like(study["block"], study["attention"], unstopped), 1, 6, 0.0),
    "Medusa's tree": (np.array(MEDUSA_TREE), 0, 64, HEADS),
}


def speedup(method: tuple, costs: tuple) -> np.ndarray:
    """Over a vanilla token, by task."""
    (vanilla, draft, rest), verification = costs
    rate, drafts, nodes, ms = method
    round_ms = drafts * (draft + ms) if np.any(drafts) else ms
    round_ms = round_ms + np.interp(np.asarray(nodes) + 1, *verification) + rest
    return rate * vanilla / round_ms


def interval(values: np.ndarray) -> str:
    """The mean of six tasks, and its 95% by drawing tasks again."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{values.mean():.2f} ({low:.2f}-{high:.2f})"


print("| method | tokens a round |", " | ".join(COSTS), "|")
print("| --- | ---: |", " ---: |" * len(COSTS))
for name, method in METHODS.items():
    results = [interval(speedup(method, costs)) for costs in COSTS.values()]
    print(f"| {name} | {method[0].mean():.2f} |", " | ".join(results), "|")
print("\n| a chain's threshold | tokens a round |", " | ".join(COSTS), "|")
print("| ---: | ---: |", " ---: |" * len(COSTS))
for threshold, (rate, paper) in BY_THRESHOLD.items():
    chain = (rate / paper - VERIFICATION) / DRAFT_TOKEN
    results = [f"{speedup((rate, chain, chain, 0.0), costs):.2f}" for costs in COSTS.values()]
    print(f"| {threshold} | {rate:.2f} |", " | ".join(results), "|")
