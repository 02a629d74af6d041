"""Search which of a target's layers a draft may skip, by how often it then still agrees.

Shapes: T tokens of a conversation, M assistant positions, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo.drafters.layer_subset import LayerSubset, draft_cost, runs, write
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.clock import running
from kangaroo.heads.adapter_files import target_hash
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, DraftSize, Ranged, Seed

Subset = tuple[int, ...]  # the layers that are skipped, ascending


@dataclass
class SearchConfig(Ranged):
    """How much is tried, and on what.

    Args:
        budget: subsets that are tried.
        conversations: at the end of the data.
        max_length: tokens of each.
        steps: the longest draft that is thought of.
        seed: of the order in which subsets are tried.
    """

    budget: Count = 200
    conversations: Count = 8
    max_length: Count = 512
    steps: DraftSize = 6
    seed: Seed = 0


@dataclass
class JudgedText:
    """A conversation in the whole target's cache, and what it says at the assistant's positions."""

    tokens_1M: Tensor
    top_M: Tensor
    cache: KVCache
    meta: ForwardMeta


def search(
    lm: TargetModel, samples: Sequence[Sample], config: SearchConfig, file: Path
) -> LayerSubset:
    """The subset with the best expected speedup among `budget` that a local search tries.

    A change of one layer, or an exchange of two, is kept unless it is worse. What was tried is kept
    beside `file`, so that a search that was stopped goes on.

    Errors: `ConfigError`.
    """
    if lm.n_layers < 2:
        raise ConfigError(f"the target must have 2 layers or more, not {lm.n_layers}.")
    started = running()
    tokens = [
        sample["input_ids"][: config.max_length] for sample in samples[-config.conversations :]
    ]
    text_hash = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    texts = [look(lm, sample, config.max_length) for sample in samples[-config.conversations :]]
    identity = {"target": target_hash(lm), "text": text_hash}
    tried = Tried(file.with_suffix(".tried.jsonl"), identity)
    rng = random.Random(config.seed)
    budget = min(config.budget, 2**lm.n_layers - 2)  # all subsets but none and all
    best = subset = tuple(range(1, lm.n_layers - 1, 2)) or (0,)  # every other layer
    speedup = agreement = 0.0
    seen: set[Subset] = set()
    bar = tqdm(total=budget, unit="subset", desc="searching")
    while True:
        seen.add(subset)
        right = tried.get(subset)
        if right is None:
            right = agreement_of(lm, texts, subset)
            tried.add(subset, right)
        expected = expected_speedup(right, draft_cost(lm, subset), config.steps)
        if expected >= speedup:
            best, agreement, speedup = subset, right, expected
        bar.update()
        bar.set_postfix(speedup=f"{speedup:.3f}", agreement=f"{agreement:.3f}")
        if len(seen) == budget:
            break
        subset = best
        while subset in seen:  # where all that is near is known, the walk leads further
            subset = neighbour(subset, lm.n_layers, rng)
    bar.close()
    about = {
        "agreement": agreement,
        "expected_speedup": speedup,
        "draft_cost": draft_cost(lm, best),
        "positions": sum(len(text.top_M) for text in texts),
        "seconds": running() - started,
        "settings": asdict(config),
    } | provenance()
    winner = LayerSubset(list(best), lm.name, target_hash(lm), about)
    write(winner, file)
    return winner


class Tried:
    """What each subset was worth, a line of JSON each, on disk at once."""

    def __init__(self, file: Path, identity: dict[str, str]):
        self.file, self.agreement = file, dict[Subset, float]()
        file.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(identity)
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        if not lines or lines[0] != head + "\n":
            file.write_text(head + "\n")
            return
        for line in lines[1:]:
            if line.endswith("\n"):  # the last may have been cut short
                entry = json.loads(line)
                self.agreement[tuple(entry["skip"])] = entry["agreement"]
        kept = [head, *(self._line(*item) for item in self.agreement.items())]
        file.write_text("\n".join(kept) + "\n")

    def get(self, subset: Subset) -> float | None:
        """The subset's agreement if it is known."""
        return self.agreement.get(subset)

    def add(self, subset: Subset, agreement: float) -> None:
        """Note a subset's agreement, on disk at once."""
        with self.file.open("a") as stream:
            stream.write(self._line(subset, agreement) + "\n")

    @staticmethod
    def _line(subset: Subset, agreement: float) -> str:
        return json.dumps({"skip": subset, "agreement": agreement})


def neighbour(subset: Subset, n_layers: int, rng: random.Random) -> Subset:
    """Another subset: one layer more or less, or one for another."""
    skipped = set(subset)
    layer = rng.randrange(n_layers)
    skipped ^= {layer}
    if rng.random() < 0.5:
        skipped ^= {rng.randrange(n_layers)}
    return tuple(sorted(skipped)) if 0 < len(skipped) < n_layers else subset


def expected_speedup(agreement: float, cost: float, steps: int) -> float:
    """With the best number of draft tokens up to `steps`, if each agrees by itself.

    Source: Leviathan et al. 2023, theorem 3.8.
    """
    return max(
        sum(agreement**k for k in range(gamma + 1)) / (gamma * cost + 1)
        for gamma in range(1, steps + 1)
    )


@torch.no_grad()
def look(lm: TargetModel, sample: Sample, max_length: int) -> JudgedText:
    """The whole target's pass over a conversation, and where its tokens go once more, as drafts."""
    tokens_1T = torch.tensor([sample["input_ids"][:max_length]], device=lm.device)
    length = tokens_1T.shape[1]
    wanted_M = torch.tensor(sample["loss_mask"][1:length], device=lm.device).nonzero()[:, 0]
    count = len(wanted_M)
    cache = lm.new_cache(1, length + count)
    meta = lm.chunk(0, length, row=0, n_slots=length + count)
    x_1TD, _ = lm.run(lm.embed(tokens_1T), cache, meta, range(lm.n_layers))
    top_M = lm.logits(x_1TD[:, wanted_M]).argmax(-1)[0]
    # a draft's token sees the whole target's keys of the text before it, and its own
    slots_1M = torch.arange(length, length + count, device=lm.device)[None]
    slots_E = torch.arange(length + count, device=lm.device)
    hidden_1ME = (slots_E >= wanted_M[:, None]) & (slots_E != slots_1M[0][:, None])
    drafts = lm.forward_meta_of(slots_1M, wanted_M[None], hidden_1ME[None], length + count)
    return JudgedText(tokens_1T[:, wanted_M], top_M, cache, drafts)


@torch.no_grad()
def agreement_of(lm: TargetModel, texts: Sequence[JudgedText], skip: Subset) -> float:
    """How often the first draft token is the target's choice."""
    right = total = 0
    for text in texts:
        x_1MD = lm.embed(text.tokens_1M)
        for layers in runs(skip, lm.n_layers):
            x_1MD, _ = lm.run(x_1MD, text.cache, text.meta, layers)
        right += int((lm.logits(x_1MD).argmax(-1)[0] == text.top_M).sum())
        total += len(text.top_M)
    return right / total
