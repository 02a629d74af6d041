"""A search for the layers of a target that drafts skip, and the file with its result.

Shapes: B rows, T tokens of a conversation, M positions, D hidden size, E occupied slots.
"""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.clock import running
from kangaroo.models.loading import model_options
from kangaroo.models.prompts import Sample
from kangaroo.models.supported import target_hashes
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.utils.folders import command_line, resolve_path, write_json
from kangaroo.utils.memory import weight_bytes
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, DraftSize, Ranged, Seed
from kangaroo.utils.terminal import progress_bar

Subset = tuple[int, ...]  # the layers that are skipped, ascending


@dataclass
class SearchConfig(Ranged):
    """The options of a search.

    Args:
        budget: the number of subsets to try.
        conversations: the number of conversations to try them on, the last ones of the data.
        max_length: the most tokens of a conversation.
        steps: the longest draft, in tokens, that the expected speedup assumes.
        seed: the seed of the order in which subsets are tried.
    """

    budget: Count = 200
    conversations: Count = 8
    max_length: Count = 512
    steps: DraftSize = 6
    seed: Seed = 0


@dataclass
class JudgedText:
    """A conversation in the target's cache; its tokens at the assistant's positions, the target's
    choices after them, and the block in which layers run on them again."""

    tokens_1M: Tensor
    top_M: Tensor
    cache: KVCache
    meta: ForwardMeta


@dataclass
class LayerSubset:
    """The result of a search: the layers to skip, counted from 0; the target, as in an adapter's
    config; and the search's settings, results and provenance."""

    skip: list[int]
    target: str
    target_hash: str
    search: dict[str, Any] = field(default_factory=dict)


def runs(skip: Collection[int], n_layers: int) -> list[range]:
    """The layers that are not skipped, as ranges."""
    groups = groupby(range(n_layers), lambda layer: layer not in skip)
    parts = [list(layers) for is_kept, layers in groups if is_kept]
    return [range(layers[0], layers[-1] + 1) for layers in parts]


def draft_cost(lm: TargetModel, skip: Collection[int]) -> float:
    """The share of the target's weights that a draft token reads."""
    layers = [layer for index, layer in enumerate(lm.layers) if index not in skip]
    return weight_bytes(*layers, lm.head) / weight_bytes(*lm.layers, lm.head)


def read(path: str, lm: TargetModel | None = None) -> LayerSubset:
    """The result of a search in a file. Errors: `AdapterNotFound`, `CorruptFile`; `AdapterMismatch`
    if it is for another target than `lm`, which None does not check."""
    model = Path(path).name.removesuffix("-draft_verify.json")
    command = command_line("prepare layers", **model_options(model), output=path)
    try:
        subset = LayerSubset(**json.loads(resolve_path(path).read_text()))
    except FileNotFoundError as error:
        raise AdapterNotFound(
            f"no subset of layers at '{path}': search one ({command}), or pass drafter.skip=[...]."
        ) from error
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"'{path}' is no subset of layers ({error}); search one again: {command}"
        ) from error
    if lm is not None and subset.target_hash not in target_hashes(lm.config):
        raise AdapterMismatch(
            f"'{path}' was found for {subset.target} (config {subset.target_hash}); this target "
            f"is {lm.name} (config {target_hashes(lm.config)[0]}). Search one for it: "
            f"{command_line('prepare layers', **model_options(lm.name))}"
        )
    return subset


def search(
    lm: TargetModel, samples: Sequence[Sample], config: SearchConfig, file: Path
) -> LayerSubset:
    """The subset with the best expected speedup that a local search finds, which is also written to
    a file. A change of one or two layers is kept unless it is worse. Errors: `ConfigError`."""
    if lm.n_layers < 2:
        raise ConfigError(f"the target must have 2 layers or more, not {lm.n_layers}.")
    started = running()
    texts = [judge(lm, sample, config.max_length) for sample in samples[-config.conversations :]]
    rng = random.Random(config.seed)
    budget = min(config.budget, 2**lm.n_layers - 2)  # neither no layer nor all layers
    best = subset = tuple(range(1, lm.n_layers - 1, 2)) or (0,)  # every other layer
    speedup = agreement = 0.0
    tried: set[Subset] = set()
    with progress_bar(total=budget, unit="subset", desc="searching") as bar:
        while len(tried) < budget:
            while subset in tried:  # step further if all neighbours were tried
                subset = neighbour(subset, lm.n_layers, rng)
            tried.add(subset)
            new_agreement = agreement_of(lm, texts, subset)
            expected = expected_speedup(new_agreement, draft_cost(lm, subset), config.steps)
            if expected >= speedup:
                best = subset
                agreement = new_agreement
                speedup = expected
            bar.update()
            shown = {"speedup": f"{speedup:.3f}", "agreement": f"{agreement:.3f}"}
            bar.set_postfix(shown, refresh=False)
            subset = best
    details = {
        "agreement": agreement,
        "expected_speedup": speedup,
        "draft_cost": draft_cost(lm, best),
        "positions": sum(len(text.top_M) for text in texts),
        "seconds": running() - started,
        "settings": asdict(config),
    } | provenance()
    result = LayerSubset(list(best), lm.name, target_hashes(lm.config)[0], details)
    write_json(file, asdict(result))
    return result


def neighbour(subset: Subset, n_layers: int, rng: random.Random) -> Subset:
    """A subset with one layer added or removed, or two."""
    skipped = set(subset) ^ {rng.randrange(n_layers)}
    if rng.random() < 0.5:
        skipped ^= {rng.randrange(n_layers)}
    return tuple(sorted(skipped)) if 0 < len(skipped) < n_layers else subset


def expected_speedup(agreement: float, cost: float, steps: int) -> float:
    """The speedup with the best number of draft tokens up to `steps`, if each agrees independently
    (Leviathan et al. 2023, theorem 3.8)."""
    return max(
        sum(agreement**k for k in range(gamma + 1)) / (gamma * cost + 1)
        for gamma in range(1, steps + 1)
    )


@torch.no_grad()
def judge(lm: TargetModel, sample: Sample, max_length: int) -> JudgedText:
    """Run the whole target over a conversation."""
    tokens_1T = torch.tensor([sample["input_ids"][:max_length]], device=lm.device)
    length = tokens_1T.shape[1]
    positions_M = torch.tensor(sample["loss_mask"][1:length], device=lm.device).nonzero()[:, 0]
    n_slots = length + len(positions_M)
    cache = lm.new_cache(1, n_slots)
    meta = lm.chunk(0, length, row=0, n_slots=n_slots)
    x_1TD, _ = lm.run(lm.embed(tokens_1T), cache, meta, range(lm.n_layers))
    top_M = lm.logits(x_1TD[:, positions_M]).argmax(-1)[0]
    start_1 = torch.tensor([length], device=lm.device)
    drafts = first_drafts(lm, positions_M[None], start_1, used=n_slots, n_slots=n_slots)
    return JudgedText(tokens_1T[:, positions_M], top_M, cache, drafts)


def first_drafts(
    lm: TargetModel, positions_BM: Tensor, start_B: Tensor, used: int, n_slots: int
) -> ForwardMeta:
    """A block of committed tokens at the free slots from `start_B` to `used`, each like the first
    token of a draft: it sees the keys of the text before it, and its own."""
    slots_BM = start_B[:, None] + torch.arange(positions_BM.shape[1], device=start_B.device)
    slots_E = torch.arange(lm.extent(n_slots, used), device=start_B.device)
    hidden_BME = (slots_E >= positions_BM[..., None]) & (slots_E != slots_BM[..., None])
    return lm.forward_meta_of(slots_BM, positions_BM, hidden_BME, n_slots)


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
