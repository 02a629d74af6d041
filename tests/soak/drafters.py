"""Every drafter for a tiny target, with options drawn at random.

What is trained elsewhere is made by hand here, so that it is right now and wrong then: only then do
accepted tokens, rejected ones and whole drafts all occur.

Shapes: K draft vocabulary.
"""

from __future__ import annotations

import torch
from cases import Case, draft_lm
from cases import hybrid as hybrid_of
from cases import medusa as medusa_of
from helpers import adapter_for, block_for, eagle_for

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.block import Block
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.datastore import Datastore, index
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.draft_verify import DraftVerify
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.lookahead import Lookahead, LookaheadConfig
from kangaroo.drafters.medusa import sparse_tree
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from soak.settings import Build, Draw, Setting

ADAPTERS = {
    "attention": AdapterHeadConfig(),
    "layer": AdapterHeadConfig(feed_forward=True),
    "mlp": AdapterHeadConfig(attention=False, feed_forward=True),
    "own head": AdapterHeadConfig(own_head=True),
    "fused": AdapterHeadConfig(fused=True),
}
THRESHOLDS = (0.0, 0.1, 0.3, 0.6)


def drawn_adapter(lm: TargetModel, draw: Draw, *kinds: str) -> Adapter:
    architecture = ADAPTERS[draw.of("adapter", *kinds)]
    return adapter_for(lm, draw.of("exit_layer", *range(1, lm.n_layers)), architecture)


def vocabulary(lm: TargetModel, layer: Adapter, draw: Draw) -> DraftHead | None:
    """Every token to draft from, or every second one."""
    if layer.architecture.own_head or not draw.of("half_vocabulary", True, False):
        return None
    return DraftHead(lm, None, torch.arange(0, lm.config.vocab_size, 2, device=lm.device))


def datastore(setting: Setting, draw: Draw) -> Datastore:
    """Some of vanilla's texts whole, of others every second token: right here, wrong there."""
    texts = [list(text) for text in setting.texts]
    draw.shuffle(texts)
    half = len(texts) // 2
    return index(texts[:half] + [text[::2] for text in texts[half:]], setting.lm.config.vocab_size)


def kangaroo(setting: Setting, draw: Draw) -> Drafter:
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, *ADAPTERS)
    head = vocabulary(lm, layer, draw)
    return Kangaroo(lm, layer, draw.of("steps", 1, 2, 4, 7), draw.of("eta", *THRESHOLDS), head)


def kangaroo_tree(setting: Setting, draw: Draw) -> Drafter:
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, *ADAPTERS)
    limits = draw.of("steps", 1, 3, 5), draw.of("eta", *THRESHOLDS)
    head = vocabulary(lm, layer, draw)
    size = draw.of("top_k", 1, 3), draw.of("nodes", 1, 6, 9)
    return KangarooTree(lm, layer, *limits, head, *size, draw.of("least", None, 0.02, 0.1))


def hybrid(setting: Setting, draw: Draw) -> Drafter:
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, "attention", "layer", "fused")
    nodes, cost = draw.of("nodes", 3, 7, 15), draw.of("cost", 0.0, 0.02, 0.08)
    store = datastore(setting, draw) if draw.of("reference", True, False) else None
    return hybrid_of(lm, layer, draw.of("steps", 2, 4), nodes, cost, store)


def draft_model(setting: Setting, draw: Draw) -> Drafter:
    layer = drawn_adapter(setting.lm, draw, "attention", "layer")
    draft = draft_lm(Case(setting.lm, layer, []))
    return DraftModel(setting.lm, draft, draw.of("steps", 1, 4), draw.of("eta", *THRESHOLDS))


def draft_verify(setting: Setting, draw: Draw) -> Drafter:
    skip = draw.of("skip", [1], [3], [1, 3], [2, 3])
    return DraftVerify(setting.lm, skip, draw.of("steps", 1, 4, 6), draw.of("eta", *THRESHOLDS))


def medusa(setting: Setting, draw: Draw) -> Drafter:
    heads, own_head = draw.of("heads", 1, 3), draw.of("own_head", True, False)
    nodes = draw.of("nodes", 1, 2, 5) if heads > 1 else 2
    return medusa_of(setting.lm, sparse_tree([[0.5, 0.3]] * heads, nodes), own_head, heads)


def eagle(setting: Setting, draw: Draw) -> Drafter:
    head = eagle_for(setting.lm)
    steps, threshold = draw.of("steps", 1, 3, 5), draw.of("eta", *THRESHOLDS)
    if draw.of("tree", True, False):
        return KangarooTree(setting.lm, head, steps, threshold, None, 3, draw.of("nodes", 3, 9))
    return Kangaroo(setting.lm, head, steps, threshold)


def block(setting: Setting, draw: Draw) -> Drafter:
    head = block_for(setting.lm, fused=draw.of("fused", True, False))
    return Block(setting.lm, head, draw.of("steps", 1, 3, 5), draw.of("eta", *THRESHOLDS))


def prompt_lookup(setting: Setting, draw: Draw) -> Drafter:
    reference = datastore(setting, draw) if draw.of("reference", True, False) else None
    return PromptLookup(draw.of("ngram", 1, 2, 3), draw.of("steps", 1, 5, 10), reference)


def rest(setting: Setting, draw: Draw) -> Drafter:
    steps, nodes = draw.of("steps", 2, 5), draw.of("nodes", 3, 9)
    return Rest(datastore(setting, draw), RestConfig(steps=steps, num_draft=nodes))


def lookahead(setting: Setting, draw: Draw) -> Drafter:
    window, ngram = draw.of("window", 1, 4), draw.of("ngram", 2, 4)
    return Lookahead(LookaheadConfig(window=window, ngram=ngram, guesses=draw.of("guesses", 1, 3)))


def cascade(setting: Setting, draw: Draw) -> Drafter:
    second = {"kangaroo": kangaroo, "kangaroo_tree": kangaroo_tree, "draft_model": draft_model}
    chosen = second[draw.of("second", *second)](setting, draw)
    return Cascade(
        setting.lm,
        PromptLookup(2, 4, datastore(setting, draw)),
        chosen,
        draw.of("extend", True, False),
    )


def vanilla(setting: Setting, draw: Draw) -> Drafter:
    return Vanilla()


DRAFTERS: dict[str, Build] = {
    build.__name__: build
    for build in [
        *(vanilla, kangaroo, kangaroo_tree, hybrid, draft_model, draft_verify, medusa),
        *(block, eagle, prompt_lookup, rest, lookahead, cascade),
    ]
}
