"""What must be lossless: every drafter, and the targets, samplings and batches to try it on.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import helpers
import pytest
import torch
from helpers import EXIT, VOCABULARY, adapter_for, chain_of, eagle_for, tiny, tree_of
from torch import Tensor

from kangaroo import ClaspConfig, LayerSkipConfig, SwiftConfig
from kangaroo.cuda.backend import CudaBackend
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.block import Block
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.datastore import Datastore, index
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.draft_verify import DraftVerify
from kangaroo.drafters.eagle import EagleTree
from kangaroo.drafters.expected_gain import Costs
from kangaroo.drafters.hybrid import Hybrid, HybridConfig, TextHybrid
from kangaroo.drafters.llma import Llma, LlmaConfig
from kangaroo.drafters.lookahead import Lookahead, LookaheadConfig
from kangaroo.drafters.medusa import Medusa
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.drafters.suffix import Suffix
from kangaroo.drafters.token_recycling import TokenRecycling
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling, candidates, combine, pick
from kangaroo.heads import medusa_heads
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead, TextHead
from kangaroo.heads.export import draft_model
from kangaroo.heads.layer import Layer
from kangaroo.heads.medusa_heads import MedusaHeads
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import AUTO

NEW_TOKENS, CHUNK = 12, 16
# 40: several chunks; 1: one token, in a row used before; 17: a last chunk of one token
PROMPTS = helpers.random_prompts(5, 40, 1, 17)
LONGER = helpers.random_prompts(5, 55, 1, 120)
EVEN_K = torch.arange(0, VOCABULARY, 2)  # a draft vocabulary
SCRIPTED = {"oracle", "adversary", "sometimes", "tree", "tree-shared", "tree-from-exit"}

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=3),
    "top-p": Sampling(temperature=1.2, top_p=0.8, seed=4),
    "top-k": Sampling(temperature=1.5, top_k=5, top_p=0.95, seed=5),
}

GREEDY_OR_NOT = [("greedy",), ("sampled",)]
MIXED = "mixed"  # each text by another of these

HOW = [*SAMPLINGS, MIXED]
BATCHES = {"alone": 1, "ragged": len(PROMPTS), "admitted": 2}  # rows at a time

FAMILIES: dict[str, Callable[[], TargetModel]] = {
    name: partial(tiny, architecture, **fields)
    for name, (architecture, fields) in helpers.ARCHITECTURES.items()
} | {
    "llama-compiled": lambda: tiny("llama").compile_for_decoding(),
    "qwen2-compiled": lambda: tiny("qwen2").compile_for_decoding(),
    "llama-graphs": lambda: helpers.graphed(tiny("llama")),
    "qwen3-compiled": lambda: tiny("qwen3", head_dim=40).compile_for_decoding(),
}


lm_of = cache(lambda family: FAMILIES[family]())


@dataclass
class Case:
    """What a drafter may be built from: `texts` are what vanilla decoding writes."""

    lm: TargetModel
    adapter: Adapter
    texts: list[list[int]]


def kangaroo(lm: TargetModel, **parts: int) -> Drafter:
    return chain_of(lm, adapter_for(lm, EXIT, AdapterHeadConfig(**parts)), 4, 0.3)


def first_layers(lm: TargetModel, count: int):
    """What `generate(assistant_early_exit=count)` makes its assistant of."""
    hf = deepcopy(lm.hf)
    hf.set_attn_implementation("sdpa" if hf.config.model_type != "gemma2" else "eager")
    hf.model.layers, hf.config.num_hidden_layers = hf.model.layers[:count], count
    if getattr(hf.config, "layer_types", None):
        hf.config.layer_types = hf.config.layer_types[:count]
    return hf


def draft_lm(case: Case) -> TargetModel:
    has_norms_after = hasattr(case.lm.layers[0], "post_feedforward_layernorm")
    hf = first_layers(case.lm, EXIT) if has_norms_after else draft_model(case.lm, case.adapter)
    draft, backend = TargetModel(hf), case.lm.backend
    if isinstance(backend, CudaBackend):
        return draft.decode_by(CudaBackend(kernel_sizes=backend.kernel_sizes and draft.sizes()))
    return draft.compile_for_decoding() if backend.is_compiled else draft


def medusa(lm: TargetModel, choices: Sequence[tuple[int, ...]], own_head: bool = True) -> Medusa:
    """Untrained: each head guesses what the target's own head says."""
    parts = medusa_heads.MedusaHeadsConfig(heads=3, own_head=own_head)
    trained = MedusaHeads(lm, parts, EVEN_K).start_from(lm, EVEN_K)
    trained = trained.to(lm.device, lm.dtype).requires_grad_(False)
    return Medusa(lm, trained, trained.draft_heads(lm, EVEN_K.to(lm.device)), choices)


def block(case: Case, steps: int, threshold: Any, few: Any = None, **parts: Any) -> Block:
    head = helpers.block_for(case.lm, few, **parts)
    draft_head = None if few is None else head.draft_heads(case.lm, few)[0]
    return chain_of(case.lm, head, steps, threshold, draft_head, kind=Block)


def of_text(case: Case) -> TextHead:
    """Every eighth token, and some of those of the text."""
    return TextHead(case.lm, EVEN_K[::4], room=20)


def fused(case: Case) -> Case:
    return replace(case, adapter=adapter_for(case.lm, architecture=AdapterHeadConfig(fused=True)))


def on_embeddings(case: Case) -> Case:
    parts = AdapterHeadConfig(fused=True)
    return replace(case, adapter=adapter_for(case.lm, 0, architecture=parts))


def chain_from(case: Case, head: DraftHead | None) -> Drafter:
    return chain_of(case.lm, case.adapter, 4, 0, head)


def tree(case: Case, *options: Any) -> Drafter:
    return tree_of(case.lm, case.adapter, *options)


def eagle_tree(case: Case, *least: float, **kind: type) -> Drafter:
    return tree_of(case.lm, eagle_for(case.lm), 3, 0, None, 3, 9, *least, **kind)


def eagle3_tree(case: Case, top_k: int, nodes: int, few: Any = None) -> Drafter:
    trained = helpers.eagle3_for(case.lm, few)
    (head,) = trained.draft_heads(case.lm, few)
    return tree_of(case.lm, trained, 3, 0, head, top_k, nodes, 0.0, kind=EagleTree)


def behind(case: Case, second: Drafter) -> Cascade:
    return Cascade(helpers.Sometimes(case.texts), second)


def datastore_of(case: Case) -> Datastore:
    """Some texts whole, others half, and rubbish: right here, wrong there, nothing elsewhere."""
    halves = [text[: len(text) // 2] + text[::2] for text in case.texts[1::2]]
    return index(case.texts[::2] + halves, case.lm.config.vocab_size)


def hybrid(
    case: Case, nodes: int, cost: float, head: DraftHead | None = None, **sources: Any
) -> Hybrid:
    options = HybridConfig(steps=4, threshold=0, nodes=nodes, **sources)
    return with_costs(Hybrid(case.lm, case.adapter, options, head), costs_of(nodes, cost))


def costs_of(nodes: int, cost: float) -> Costs:
    return Costs([1 + cost * node for node in range(nodes + 1)], cost, 1.0)


def with_costs(drafter: Any, costs: Costs) -> Any:
    drafter.costs, drafter.needs_costs, drafter.update_costs = costs, False, lambda *_, **__: None
    return drafter


def cheap(drafter: Any) -> Any:
    """With a cost that pays in a model this small, so that the budget lets it draft."""
    drafter.draft_cost = 0.02
    return drafter


# A new drafter adds its line here.
DRAFTERS: dict[str, Callable[[Case], Drafter]] = {
    "vanilla": lambda case: Vanilla(),
    "kangaroo": lambda case: chain_of(case.lm, case.adapter, steps=4, threshold=0),
    "kangaroo-stops": lambda case: chain_of(case.lm, case.adapter, steps=4, threshold=0.3),
    "kangaroo-auto": lambda case: cheap(chain_of(case.lm, case.adapter, 4, AUTO)),
    "kangaroo-vocabulary": lambda case: chain_from(case, DraftHead(case.lm, None, EVEN_K)),
    "kangaroo-text-vocabulary": lambda case: chain_from(case, of_text(case)),
    "kangaroo-layer": lambda case: kangaroo(case.lm, feed_forward=True),
    "kangaroo-mlp": lambda case: kangaroo(case.lm, attention=False, feed_forward=True),
    "kangaroo-own-head": lambda case: kangaroo(case.lm, own_head=True),
    "kangaroo-two-layers": lambda case: kangaroo(case.lm, attention_layers=2),
    "kangaroo-fused": lambda case: kangaroo(case.lm, fused=True),
    "kangaroo-fused-layer": lambda case: kangaroo(case.lm, fused=True, feed_forward=True),
    "kangaroo-fused-two-layers": lambda case: kangaroo(case.lm, fused=True, attention_layers=2),
    "kangaroo-on-embeddings": lambda case: chain_of(case.lm, adapter_for(case.lm, 0), 4, 0.3),
    "kangaroo-on-embeddings-fused": lambda case: chain_from(on_embeddings(case), None),
    "kangaroo-tree": lambda case: tree(case, 3, 0, None, 3, 8),
    "kangaroo-tree-text-vocabulary": lambda case: tree(case, 3, 0.05, of_text(case), 3, 9),
    "kangaroo-tree-stops": lambda case: tree(case, 4, 0.3, None, 4, 2),
    "kangaroo-tree-least": lambda case: tree(case, 3, 0, None, 4, 9, 0.02),
    "kangaroo-tree-auto": lambda case: cheap(tree(case, 4, AUTO, None, 3, 9)),
    "kangaroo-tree-of-one": lambda case: tree(case, 4, 0.3, None, 1),
    "kangaroo-tree-fused": lambda case: tree(fused(case), 3, 0, None, 3, 9),
    "kangaroo-tree-on-embeddings": lambda case: tree(on_embeddings(case), 3, 0, None, 3, 9),
    "draft-model": lambda case: DraftModel(case.lm, draft_lm(case), steps=4),
    "draft-model-stops": lambda case: DraftModel(case.lm, draft_lm(case), 4, threshold=0.3),
    "draft-model-auto": lambda case: cheap(DraftModel(case.lm, draft_lm(case), 4, AUTO)),
    "draft_verify": lambda case: DraftVerify(case.lm, [1, 3], steps=4, threshold=0),
    "draft_verify-stops": lambda case: DraftVerify(case.lm, [2], steps=4, threshold=0.3),
    "layerskip": lambda case: LayerSkipConfig(exit_layer=2, steps=4, threshold=0.1).build(case.lm),
    "swift": lambda case: SwiftConfig(steps=4, threshold=0, window=9).build(case.lm),
    "clasp": lambda case: ClaspConfig(interval=2, steps=4, threshold=0.1).build(case.lm),
    "cascade": lambda case: behind(case, chain_of(case.lm, case.adapter, 4, 0.3)),
    "cascade-of-trees": lambda case: behind(case, tree(case, 3, 0, None, 3, 8)),
    "cascade-draft-model": lambda case: behind(case, DraftModel(case.lm, draft_lm(case), 3)),
    "hybrid-tree": lambda case: hybrid(case, 7, 0.001),
    "hybrid-tree-text-vocabulary": lambda case: hybrid(case, 7, 0.001, head=of_text(case)),
    "hybrid-tree-stops": lambda case: hybrid(case, 15, 0.08),
    "hybrid-tree-fused": lambda case: hybrid(fused(case), 5, 0),
    "hybrid-tree-on-embeddings": lambda case: hybrid(on_embeddings(case), 9, 0.01),
    "text-hybrid": lambda case: with_costs(TextHybrid(HybridConfig(nodes=7)), costs_of(7, 0.01)),
    "medusa": lambda case: medusa(case.lm, [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "medusa-chain": lambda case: medusa(case.lm, [(0,), (0, 0), (0, 0, 0)], own_head=False),
    "block": lambda case: block(case, 4, 0),
    "block-stops": lambda case: block(case, 3, 0.2, fused=True),
    "block-vocabulary": lambda case: block(case, 5, 0.1, EVEN_K, attention_layers=2),
    "block-auto": lambda case: cheap(block(case, 4, AUTO)),
    "eagle": lambda case: chain_of(case.lm, eagle_for(case.lm), 4, threshold=0),
    "eagle-stops": lambda case: chain_of(case.lm, eagle_for(case.lm), 4, threshold=0.2),
    "eagle-tree": lambda case: eagle_tree(case),
    "eagle-2-tree": lambda case: eagle_tree(case, 0.0, kind=EagleTree),
    "eagle3": lambda case: eagle3_tree(case, 3, 9),
    "eagle3-chain": lambda case: chain_of(case.lm, helpers.eagle3_for(case.lm), 4, threshold=0.2),
    "eagle3-vocabulary": lambda case: eagle3_tree(case, 3, 9, EVEN_K),
    "prompt-lookup": lambda case: PromptLookup(),
    "prompt-lookup-short": lambda case: PromptLookup(2, 4),
    "llma": lambda case: Llma(LlmaConfig(copy_length=6), datastore_of(case)),
    "llma-long-trigger": lambda case: Llma(LlmaConfig(trigger_length=3, copy_length=4)),
    "rest-tree": lambda case: Rest(datastore_of(case), RestConfig(steps=5, num_draft=9)),
    "rest-tree-sparse": lambda case: Rest(datastore_of(case), RestConfig(max_matches=3)),
    "lookahead-tree": lambda case: Lookahead(LookaheadConfig(window=4, ngram=4, guesses=3)),
    "lookahead-tree-small": lambda case: Lookahead(LookaheadConfig(window=1, ngram=2, guesses=1)),
    "suffix": lambda case: Suffix(6),
    "token-recycling-tree": lambda case: TokenRecycling(9, vocab_size=case.lm.config.vocab_size),
    "cascade-token-recycling-tree": lambda case: Cascade(Suffix(4, 0.5), TokenRecycling(7)),
    "oracle": lambda case: helpers.oracle(case.texts),
    "adversary": lambda case: helpers.adversary(case.texts),
    "sometimes": lambda case: helpers.Scripted(case.texts, lambda position: position % 3 > 0),
    "tree": lambda case: helpers.RandomTree(case.lm, case.texts),
    "tree-shared": lambda case: helpers.RandomTree(case.lm, case.texts, shared=True),
    "tree-from-exit": lambda case: helpers.RandomTree(case.lm, case.texts, entry=EXIT),
}

# The others are variants, named after their method.
METHODS = [n for n in DRAFTERS if not any(n.startswith(f"{method}-") for method in DRAFTERS)]


# What a variant is called by that differs from its method by settings and weights alone. To an
# engine both are the same.
SETTINGS = (
    "-stops -auto -vocabulary -layer -mlp -own-head -least -of-one -short -long-trigger "
    "-sparse -small"
).split()
KINDS = [name for name in DRAFTERS if not name.endswith(tuple(SETTINGS))]


def in_turn(names: Iterable[str], values: Sequence[tuple]) -> list[Any]:
    """Every name with all values; in the fast tests with one in turn."""
    return [
        pytest.param(name, *value, marks=() if i % len(values) == j else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, value in enumerate(values)
    ]


def with_each(*values: object) -> list[Any]:
    """Every kind of drafter with every value; in the fast tests with one in turn."""
    return in_turn(KINDS, [(value,) for value in values])


def samplings(name: str) -> list[Sampling]:
    """Of each prompt, with its seed."""
    kinds = SAMPLINGS.values() if name == MIXED else [SAMPLINGS[name]]
    turns = itertools.islice(itertools.cycle(kinds), len(PROMPTS))
    return [replace(how, seed=how.seed + i) for i, how in enumerate(turns)]


def case_for(lm: TargetModel, sampling: str) -> Case:
    pairs = zip(PROMPTS, samplings(sampling), strict=True)
    texts = [helpers.vanilla_texts(lm, [prompt], NEW_TOKENS, how)[0] for prompt, how in pairs]
    return Case(lm, adapter_for(lm), texts)


@cache
def case_of(family: str, sampling: str) -> Case:
    if sampling != MIXED:
        return case_for(lm_of(family), sampling)
    kinds = [case_of(family, name) for name in SAMPLINGS]
    return replace(kinds[0], texts=[kinds[i % len(kinds)].texts[i] for i in range(len(PROMPTS))])


def check_texts(case: Case, drafter: str, sampling: str, rows: int) -> None:
    """It writes what vanilla decoding writes alone."""
    engine = Engine(case.lm, DRAFTERS[drafter](case), prefill_chunk=CHUNK)
    of_all, requests = SAMPLINGS.get(sampling, SAMPLINGS["top-k"]), []
    for prompt, how in zip(PROMPTS, samplings(sampling), strict=True):
        differs = replace(how, seed=of_all.seed) != of_all
        requests.append(Request(prompt, NEW_TOKENS, how.seed, sampling=how if differs else None))
    done = dict(engine.completions(requests, of_all, rows))
    assert [p + done[i].tokens for i, p in enumerate(PROMPTS)] == case.texts, drafter


def rounds_of(done: list[Generation]) -> list[list[tuple[list[int], int, int]]]:
    """What each round of each text wrote, how much of it was accepted, and what it drafted."""
    return [[(s.tokens, s.accepted, s.drafted) for s in text.steps] for text in done]


def accepted(drafter: Drafter, lm: TargetModel, sampling: Sampling, rows: int = 2) -> set[int]:
    """How many tokens were accepted in some round or other, of prompts in chunks."""
    done = Engine(lm, drafter, prefill_chunk=CHUNK).generate(PROMPTS, NEW_TOKENS, sampling, rows)
    return {count for text in rounds_of(done) for _, count, _ in text}


def filled(lm: TargetModel, text: list[int], room: int = 0):
    """The whole target's keys of a text but for its last token, and where that goes."""
    last = len(text) - 1
    cache = lm.new_cache(1, len(text) + room)
    if last:
        meta = lm.chunk(0, last, row=0, n_slots=cache.n_slots)
        lm.run(lm.embed(torch.tensor([text[:-1]])), cache, meta, range(lm.n_layers))
    return cache, lm.chunk(last, last + 1, row=0, n_slots=cache.n_slots)


def written_by_some(
    lm: TargetModel, runs: Sequence[range], sampling: Sampling, cut: Any = None
) -> Callable[[list[int], int, int], list[int]]:
    """What these layers, or half layers of `cut`, write after a text with the target's own keys."""

    @torch.no_grad()
    def expected(text: list[int], seed: int, count: int) -> list[int]:
        tokens, (cache, meta) = list(text), filled(lm, text, room=count)
        for length in range(len(text), len(text) + count):
            meta = lm.chunk(length - 1, length, row=0, n_slots=cache.n_slots)
            x_11D = lm.embed(torch.tensor([tokens[-1:]]))
            for layers in runs:
                x_11D, _ = (cut or lm).run(x_11D, cache, meta, layers)
            at, seeds = torch.tensor([[length]]), torch.tensor([seed])
            tokens.append(int(pick(lm.logits(x_11D), at, combine([sampling]), seeds)))
        return tokens[len(text) :]

    return expected


@torch.no_grad()
def deep_states(lm: TargetModel, adapter: Layer, ids: list[int]) -> Tensor:
    """What the adapter reads of the target's deep states, `[1, T, D]`."""
    return adapter.read_deep(lm, [helpers.states_after(lm, ids, tap) for tap in adapter.deep_taps])


@torch.no_grad()
def last_state(lm: TargetModel, adapter: Layer, ids: list[int], pending: int) -> Tensor:
    """The adapter's state at the last of `ids`, whose tokens after `pending` are only drafted; by
    the definition, in a whole pass a token: from `pending` on its own states are the deep ones."""
    before_1TD, length = None, len(ids)
    if not adapter.deep_taps:
        f_1TD = helpers.states_after(lm, ids, adapter.exit_layer)
        return adapter(f_1TD, None, lm.chunk(0, length, 0, length), None)[0, -1]
    deep_1TD = deep_states(lm, adapter, ids[:pending])
    for end in range(pending + 1, length + 1):
        f_1TD = helpers.states_after(lm, ids[:end], adapter.exit_layer)
        before_1TD = torch.cat([torch.zeros(1, 1, deep_1TD.shape[-1]), deep_1TD], 1)
        own_1TD = adapter(f_1TD, before_1TD, lm.chunk(0, end, 0, end), None)
        deep_1TD = torch.cat([deep_1TD, own_1TD[:, -1:]], 1)
    return deep_1TD[0, -1]


def choices_without_cache(
    case: Case, text: list[int], drafted: Sequence[int], sampling: Sampling, seed: int, count: int
) -> list[tuple[int, float]]:
    """The adapter's best choices after `text` and what was drafted, and the best chances."""
    ids = [*text, *drafted]
    (head,) = case.adapter.draft_heads(case.lm, None)
    logits_11V = head(last_state(case.lm, case.adapter, ids, len(text) - 1)[None])[None]
    at, seeds = torch.tensor([[len(ids)]]), torch.tensor([seed])
    tokens = candidates(logits_11V, at, combine([sampling]), seeds, count).flatten().tolist()
    chances = logits_11V.softmax(-1).topk(count).values.flatten().tolist()
    return list(zip(tokens, chances, strict=True))


def drafted_without_cache(
    case: Case, text: list[int], steps: int, sampling: Sampling, seed: int
) -> list[int]:
    """What the adapter drafts after `text`, by a whole forward a token."""
    drafted: list[int] = []
    for _ in range(steps):
        drafted.append(choices_without_cache(case, text, drafted, sampling, seed, 1)[0][0])
    return drafted
