"""The time that the kernels of `kangaroo/cuda` should take: `python scripts/gpu/arithmetic.py`.

All of it is arithmetic, with the tiles that are launched. A product takes the longest of: its
weights from memory, its operands from the second-level cache, its instructions. One number is
fitted: the time between two kernels, so that the same arithmetic for the kernels of 2026-11-26 gave
what a token's verification at 7B took. Not counted: the host, and what runs beside layers and head.

Shapes: K inputs and O outputs of a product.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add
from unittest.mock import patch

import torch

from kangaroo.cuda import launching
from kangaroo.cuda.launching import PARTS, Attention, Card, cdiv, folds_parts, tile
from kangaroo.engine.backend import Sizes

BETWEEN = 1.2e-6  # seconds from one kernel to the next, fitted
CACHE = 5.5e12  # bytes/s from the second-level cache, as others measured on an H100
MULTIPLIES = 4096 * 1.755e9  # 16-bit operations/s of a processor, by its clock
ATTENDS = 0.45  # of that in attention: exponentials and sums alternate with products
CARD = Card(132, 227 << 10)
READS = {"H100": 3.05e12, "H200": 4.37e12}  # bytes/s: measured; and the same share of what is said


@dataclass
class Model(Sizes):
    """A Llama model of 32 layers in 16 bits."""

    vocabulary: int

    def matrices(self) -> list[tuple[int, int, int]]:
        """Inputs, outputs, and parts of the sum, of a layer's four products."""
        return [
            (self.hidden, self.hidden + 2 * self.kv_heads * self.head_size, 1),
            (self.hidden, self.hidden, PARTS),
            (self.hidden, 2 * self.feed_forward, 1),
            (self.feed_forward, self.hidden, PARTS),
        ]


MODELS = {
    "7B": Model(4096, 32, 32, 128, 11008, 1e-5, 1.0, 32000),
    "8B": Model(4096, 32, 8, 128, 14336, 1e-5, 1.0, 128256),
}


@dataclass
class Cost:
    """The cost of some kernels: seconds, bytes from memory, operations, launches."""

    seconds: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, astuple(self), astuple(other)))

    def times(self, count: int) -> Cost:
        """The same kernels so many times."""
        return Cost(*(count * value for value in astuple(self)))


def product(tokens: int, inputs: int, outputs: int, parts: int, reads: float) -> Cost:
    """The cost of a product, with the tile that is launched."""
    weight = torch.empty(1, inputs, dtype=torch.bfloat16, device="meta")
    folds = parts > 1 and folds_parts(weight, outputs, tokens)
    shape = tile(weight, outputs, tokens, parts, folds=folds)
    rows, columns = shape["TOKENS"], shape["BO"]
    programs = cdiv(tokens, rows) * cdiv(outputs, columns)
    weight_bytes = 2 * inputs * outputs
    from_cache = 2 * inputs * programs * (min(rows, tokens) + columns)
    waves = cdiv(programs, CARD.processors) if tokens > rows else programs / CARD.processors
    multiplies = waves * 2 * rows * columns * inputs / MULTIPLIES
    seconds = max(weight_bytes / reads, from_cache / CACHE, multiplies) + BETWEEN
    sums = 0 if folds or parts == 1 else 2 * 4 * parts * tokens * outputs
    return Cost(seconds + sums / CACHE, weight_bytes, 2 * tokens * inputs * outputs, 1)


def attention(model: Model, work: Work, reads: float) -> Cost:
    """The cost in a layer; the last positions of the context are the tokens' own."""
    total = work.rows * work.tokens
    seen = work.context - (work.tokens - 1) / 2
    keys = 4 * work.rows * work.context * model.kv_heads * model.head_size
    operations = 4 * total * seen * model.heads * model.head_size
    q_NO = torch.empty(total, model.hidden, dtype=torch.bfloat16, device="meta")
    pieces = Attention.of(q_NO, model, work.rows, work.context, 0).pieces
    sums = 2 * 4 * total * model.heads * (model.head_size + 2) * pieces
    queries = work.tokens * model.heads // model.kv_heads
    tiles = cdiv(queries, 64 if queries <= 64 else 128)
    from_cache = tiles * 4 * work.rows * seen * model.kv_heads * model.head_size
    multiplies = operations / (CARD.processors * MULTIPLIES * ATTENDS)
    launches = 1 + (pieces > 0)
    longest = max(keys / reads, (from_cache + sums) / CACHE, multiplies)
    return Cost(longest + launches * BETWEEN, keys, operations, launches)


@dataclass(frozen=True)
class Work:
    """A pass over `tokens` of each row, which see `context` positions, through so many layers and
    the head; or through the layers alone; or all passes of a prompt."""

    tokens: int
    context: int
    rows: int = 1
    layers: int = 32
    head: bool = True
    is_prompt: bool = False


def cost_of(work: Work, name: str, gpu: str) -> Cost:
    """The cost of this work for a model on a GPU."""
    if work.is_prompt:
        passes = cdiv(work.tokens, 1024)
        chunk = min(work.tokens, cdiv(work.tokens, 128 * passes) * 128)
        cost = cost_of(Work(1, work.tokens, layers=1), name, gpu)
        for start in range(0, work.tokens, chunk):
            width = min(chunk, work.tokens - start)
            cost += cost_of(Work(width, start + width, head=False), name, gpu)
        return cost
    model = MODELS[name]
    total = work.rows * work.tokens
    norm = Cost(BETWEEN + 4 * total * model.hidden * 2 / CACHE, 0, 0, 1)
    layer = norm.times(2) + attention(model, work, READS[gpu])
    for inputs, outputs, parts in model.matrices():
        layer += product(total, inputs, outputs, parts, READS[gpu])
    cost = layer.times(work.layers)
    if work.head:
        cost += norm + product(total, model.hidden, model.vocabulary, 1, READS[gpu])
    return cost


# Verification begins at layer 2.
WORK = {
    "a token at context 256": Work(1, 257),
    "draft token: 2 layers and head": Work(1, 257, layers=2),
    "verifying 1 token": Work(1, 257, layers=30),
    "verifying 8 tokens": Work(8, 264, layers=30),
    "verifying 64 tokens": Work(64, 320, layers=30),
    "prompt of 1,024": Work(1024, 1024, is_prompt=True),
    "prompt of 8,144": Work(8144, 8144, is_prompt=True),
    "64 rows, a token of each": Work(1, 257, rows=64),
    "256 rows, a token of each": Work(1, 257, rows=256),
    "a token at context 8,144": Work(1, 8145),
    "a token at context 32,000": Work(1, 32001),
}


def page() -> str:
    """The table in Markdown, in ms."""
    head = "", "GB", "TFLOP", "launches", *READS
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in MODELS:
        for what, work in WORK.items():
            costs = [cost_of(work, name, gpu) for gpu in READS]
            cells = f"{costs[0].bytes / 1e9:.1f}", f"{costs[0].operations / 1e12:.2f}"
            cells += f"{costs[0].launches}", *(f"{1e3 * cost.seconds:.2f}" for cost in costs)
            lines.append(f"| {name}, {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with patch.object(launching, "card_of", lambda device: CARD):
        print(page())
