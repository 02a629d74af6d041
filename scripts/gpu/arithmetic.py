"""What the kernels of `kangaroo/cuda` should take, by arithmetic: `python scripts/gpu/arithmetic.py`.

Nothing here is measured but what the tables say was. A product takes the longest of: its weights
from memory, its operands from the second-level cache, its instructions. The kernels of 2026-11-26
had 16 tokens an instruction, and a program waited for its loads in each step, so there the times
add up. Two numbers are fitted: the time between two kernels, so that a token's verification at 7B
takes what it took, and that of reading a piece of attention, by a token's growth from 256 to 8,144
positions at 8B. Not counted: the host, and what runs beside layers and head.

Shapes: K inputs and O outputs of a product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch

from kangaroo.cuda import launching
from kangaroo.cuda.launching import PARTS, Attention, Card, cdiv, folds_parts, tile
from kangaroo.engine.backend import Sizes

BETWEEN = 1.2e-6  # seconds from one kernel to the next, fitted
PIECE = 0.1e-6  # seconds for a piece of attention when they were read one after another, fitted
CACHE = 5.5e12  # bytes/s from the second-level cache, as others measured on an H100
CLOCK = 1.755e9
MULTIPLIES = 4096 * CLOCK  # 16-bit operations/s of a processor
ATTENDS = 0.45  # of that in attention: exponentials and sums alternate with products
CARD = Card(132, 227 << 10)
READS = {"H100": 3.05e12, "H200": 4.37e12}  # bytes/s: measured; and the same share of what is said


@dataclass(frozen=True)
class Model:
    """A Llama model in 16 bits."""

    layers: int
    sizes: Sizes
    vocabulary: int

    def matrices(self) -> list[tuple[int, int, int]]:
        """Inputs, outputs, and parts of the sum, of a layer's four products."""
        sizes = self.sizes
        of_keys = sizes.kv_heads * sizes.head_size
        return [
            (sizes.hidden, sizes.hidden + 2 * of_keys, 1),
            (sizes.hidden, sizes.hidden, PARTS),
            (sizes.hidden, 2 * sizes.feed_forward, 1),
            (sizes.feed_forward, sizes.hidden, PARTS),
        ]


MODELS = {
    "7B": Model(32, Sizes(4096, 32, 32, 128, 11008, 1e-5, 1.0), 32000),
    "8B": Model(32, Sizes(4096, 32, 8, 128, 14336, 1e-5, 1.0), 128256),
}


@dataclass
class Cost:
    """Of some kernels: seconds, bytes from memory, operations, launches."""

    seconds: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    launches: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.seconds + other.seconds,
            self.bytes + other.bytes,
            self.operations + other.operations,
            self.launches + other.launches,
        )

    def times(self, count: int) -> "Cost":
        """The same kernels so many times."""
        numbers = self.seconds, self.bytes, self.operations
        return Cost(*(count * number for number in numbers), count * self.launches)


Product = Callable[[int, int, int, int, float], Cost]  # tokens, K, O, parts, bytes/s


def old_product(tokens: int, inputs: int, outputs: int, parts: int, reads: float) -> Cost:
    """Of 2026-11-26: weights are read again for each 64 tokens; 64 weights by 16 tokens take 20
    clocks, since the weights come from shared memory each time."""
    programs = cdiv(tokens, 64)
    columns = programs * next(x for x in (1, 2, 4) if min(tokens, 64) <= 16 * x)
    clocks = inputs / 16 * outputs / 64 * columns * 20
    weight_bytes = 2 * inputs * outputs * programs
    seconds = weight_bytes / reads + clocks / CARD.processors / CLOCK + BETWEEN
    sums = 2 * 4 * parts * tokens * outputs if parts > 1 else 0
    return Cost(seconds + sums / CACHE, weight_bytes, 2 * tokens * inputs * outputs, 1)


def new_product(tokens: int, inputs: int, outputs: int, parts: int, reads: float) -> Cost:
    """Of today, with the tiles that are launched."""
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


def attention(model: Model, rows: int, tokens: int, context: int, reads: float, new: bool) -> Cost:
    """Of `tokens` in each row that see `context` positions, of which the last are their own."""
    sizes = model.sizes
    seen = context - (tokens - 1) / 2
    keys = 4 * rows * context * sizes.kv_heads * sizes.head_size
    operations = 4 * rows * tokens * seen * sizes.heads * sizes.head_size
    q_NO = torch.empty(rows * tokens, sizes.hidden, dtype=torch.bfloat16, device="meta")
    pieces = cdiv(context, 64)
    if new:
        pieces = Attention.of(q_NO, sizes, rows, context, 0).pieces
    sums = 2 * 4 * rows * tokens * sizes.heads * (sizes.head_size + 2) * pieces
    queries = tokens * sizes.heads // sizes.kv_heads
    tiles = cdiv(queries, 16 if not new else 64 if queries <= 64 else 128)
    from_cache = tiles * 4 * rows * seen * sizes.kv_heads * sizes.head_size
    multiplies = operations / (CARD.processors * MULTIPLIES * ATTENDS)
    launches = 1 + (pieces > 0)
    combining = 0.0 if new else pieces * PIECE
    longest = max(keys / reads, (from_cache + sums) / CACHE, multiplies)
    return Cost(longest + combining + launches * BETWEEN, keys, operations, launches)


def forward(
    name: str,
    gpu: str,
    new: bool,
    tokens: int,
    context: int,
    rows: int = 1,
    layers: int = 0,
    head: bool = True,
) -> Cost:
    """A pass over `tokens` of each row; `layers` are all of the model's if 0."""
    model = MODELS[name]
    product: Product = new_product if new else old_product
    total = rows * tokens
    norm = Cost(BETWEEN + 4 * total * model.sizes.hidden * 2 / CACHE, 0, 0, 1)
    layer = norm.times(2) + attention(model, rows, tokens, context, READS[gpu], new)
    for inputs, outputs, parts in model.matrices():
        layer += product(total, inputs, outputs, parts, READS[gpu])
    cost = layer.times(layers or model.layers)
    if head:
        cost += norm + product(total, model.sizes.hidden, model.vocabulary, 1, READS[gpu])
    return cost


def prompt(name: str, gpu: str, new: bool, tokens: int) -> Cost:
    """A whole prompt, in the passes of then or of today."""
    passes = cdiv(tokens, 1024)
    chunk = min(tokens, cdiv(tokens, 128 * passes) * 128) if new else 128
    cost = Cost()
    for start in range(0, tokens, chunk):
        width = min(chunk, tokens - start)
        cost += forward(name, gpu, new, width, start + width, head=False)
    return cost + forward(name, gpu, new, 1, tokens, layers=1)


# Done on an H100 on 2026-11-26 (docs/results/gpu.md), in ms. Verification begins at layer 2. To a
# first token came 16 ms that are not the kernels': the line through three lengths begins there.
FIRST = 16
MEASURED = {
    ("7B", "a token at context 256"): 5.80,
    ("7B", "verifying 1 token"): 4.86,
    ("7B", "verifying 8 tokens"): 4.95,
    ("7B", "verifying 64 tokens"): 7.79,
    ("7B", "prompt of 1,024"): 142 - FIRST,
    ("7B", "64 rows, a token of each"): 64e3 / 5629.9,
    ("8B", "a token at context 256"): 6.24,
    ("8B", "verifying 1 token"): 5.47,
    ("8B", "verifying 8 tokens"): 5.57,
    ("8B", "verifying 64 tokens"): 7.25,
    ("8B", "prompt of 8,144"): 1681 - FIRST,
    ("8B", "a token at context 8,144"): 7.00,
}
ROWS: dict[str, Callable[[str, str, bool], Cost]] = {  # of a model, on a GPU, today or then
    "a token at context 256": lambda *of: forward(*of, 1, 257),
    "draft token: 2 layers and head": lambda *of: forward(*of, 1, 257, layers=2),
    "verifying 1 token": lambda *of: forward(*of, 1, 257, layers=30),
    "verifying 8 tokens": lambda *of: forward(*of, 8, 264, layers=30),
    "verifying 64 tokens": lambda *of: forward(*of, 64, 320, layers=30),
    "prompt of 1,024": lambda *of: prompt(*of, 1024),
    "prompt of 8,144": lambda *of: prompt(*of, 8144),
    "64 rows, a token of each": lambda *of: forward(*of, 1, 257, rows=64),
    "256 rows, a token of each": lambda *of: forward(*of, 1, 257, rows=256),
    "a token at context 8,144": lambda *of: forward(*of, 1, 8145),
    "a token at context 32,000": lambda *of: forward(*of, 1, 32001),
}


def page() -> str:
    """The table in Markdown, in ms."""
    head = "", "GB", "TFLOP", "launches", "measured then", "H100 then", "H100", "H200"
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in MODELS:
        for what, work in ROWS.items():
            cost = work(name, "H100", True)
            of_work = f"{cost.bytes / 1e9:.1f} | {cost.operations / 1e12:.2f} | {cost.launches}"
            measured = MEASURED.get((name, what))
            then = "" if measured is None else f"{measured:.4g}"
            cases = ("H100", False), ("H100", True), ("H200", True)
            in_ms = " | ".join(f"{1e3 * work(name, *case).seconds:.3g}" for case in cases)
            lines.append(f"| {name}, {what} | {of_work} | {then} | {in_ms} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with patch.object(launching, "card_of", lambda device: CARD):
        print(page())
