"""Every drafter for a tiny target, with options drawn at random.

What is trained elsewhere is made by hand here, so that it is right now and wrong then: only then do
accepted tokens, rejected ones and whole drafts all occur.

Shapes: K draft vocabulary.
"""

from __future__ import annotations

import torch

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.datastore import Datastore, index
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.draft_verify import DraftVerify
from kangaroo.drafters.expected_gain import Costs
from kangaroo.drafters.hybrid import Hybrid
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.lookahead import Lookahead, LookaheadConfig
from kangaroo.drafters.medusa import Medusa, sparse_tree
from kangaroo.drafters.odds import assumed
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.heads import medusa_heads
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.heads.export import draft_model as exported
from kangaroo.models.target import LM
from kangaroo.soak.settings import Build, Draw, Setting

ADAPTERS = {
    "attention": AdapterHeadConfig(),
    "layer": AdapterHeadConfig(feed_forward=True),
    "mlp": AdapterHeadConfig(attention=False, feed_forward=True),
    "own head": AdapterHeadConfig(own_head=True),
    "fused": AdapterHeadConfig(fused=True),
}
THRESHOLDS = (0.0, 0.1, 0.3, 0.6)


def adapter(lm: LM, kind: str, exit_layer: int) -> Adapter:
    """One that is often right untrained, since the layers above the exit change little."""
    made = Adapter(lm, exit_layer, ADAPTERS[kind]).start_from(lm)
    assert made.norm is not None
    made.norm.load_state_dict(lm.hf.model.norm.state_dict())  # undamped: as sure as the target
    if made.deep_tap is not None:  # untrained it would not look at the deep state
        made.fuse.weight.data.normal_(std=0.02, generator=torch.Generator().manual_seed(2))
    return made.to(lm.device, lm.dtype).requires_grad_(False)


def drawn_adapter(lm: LM, draw: Draw, *kinds: str) -> Adapter:
    """One of these kinds, of any exit layer."""
    exits = range(1, lm.n_layers)
    return adapter(lm, draw.of("adapter", *kinds), draw.of("exit_layer", *exits))


def vocabulary(lm: LM, layer: Adapter, draw: Draw) -> DraftHead | None:
    """Every token to draft from, or every second one."""
    if layer.architecture.own_head or not draw.of("half_vocabulary", True, False):
        return None
    return DraftHead(lm, None, torch.arange(0, lm.config.vocab_size, 2, device=lm.device))


def known(setting: Setting, draw: Draw) -> Datastore:
    """Some of vanilla's texts whole, of others every second token: right here, wrong there."""
    texts = [list(text) for text in setting.texts]
    draw.rng.shuffle(texts)
    half = len(texts) // 2
    return index(texts[:half] + [text[::2] for text in texts[half:]], setting.lm.config.vocab_size)


def kangaroo(setting: Setting, draw: Draw) -> Drafter:
    """A chain by any kind of adapter."""
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, *ADAPTERS)
    head = vocabulary(lm, layer, draw)
    return Kangaroo(lm, layer, draw.of("steps", 1, 2, 4, 7), draw.of("eta", *THRESHOLDS), head)


def kangaroo_tree(setting: Setting, draw: Draw) -> Drafter:
    """A tree by any kind of adapter."""
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, *ADAPTERS)
    limits = draw.of("steps", 1, 3, 5), draw.of("eta", *THRESHOLDS)
    head = vocabulary(lm, layer, draw)
    size = draw.of("top_k", 1, 3), draw.of("nodes", 1, 6, 9)
    return KangarooTree(lm, layer, *limits, head, *size, draw.of("least", None, 0.02, 0.1))


def hybrid(setting: Setting, draw: Draw) -> Drafter:
    """A tree of the chain and the lookup."""
    lm, layer = setting.lm, drawn_adapter(setting.lm, draw, "attention", "layer", "fused")
    nodes, cost = draw.of("nodes", 3, 7, 15), draw.of("cost", 0.0, 0.02, 0.08)
    costs = Costs([1 + cost * node for node in range(nodes + 1)], cost, 1.0)
    reference = known(setting, draw) if draw.of("reference", True, False) else None
    return Hybrid(
        *(lm, layer, draw.of("steps", 2, 4)),
        odds=assumed(),
        costs=costs,
        nodes=nodes,
        reference=reference,
    )


def draft_model(setting: Setting, draw: Draw) -> Drafter:
    """The layers below an exit and their adapter, as a model of its own."""
    lm = setting.lm
    own = LM(exported(lm, drawn_adapter(lm, draw, "attention", "layer")))
    own = own.compile_for_decoding() if lm.acceleration.library else own
    return DraftModel(lm, own, draw.of("steps", 1, 4), draw.of("eta", *THRESHOLDS))


def draft_verify(setting: Setting, draw: Draw) -> Drafter:
    """The target without some of its layers."""
    skip = draw.of("skip", [1], [3], [1, 3], [2, 3])
    return DraftVerify(setting.lm, skip, draw.of("steps", 1, 4, 6), draw.of("eta", *THRESHOLDS))


def medusa(setting: Setting, draw: Draw) -> Drafter:
    """Each head guesses what the target's own head says."""
    lm = setting.lm
    heads, own_head = draw.of("heads", 1, 3), draw.of("own_head", True, False)
    vocabulary_K = torch.arange(0, lm.config.vocab_size, 2)
    parts = medusa_heads.MedusaHeadsConfig(heads=heads, own_head=own_head)
    made = medusa_heads.MedusaHeads(lm, parts, vocabulary_K).start_from(lm, vocabulary_K)
    made = made.to(lm.device, lm.dtype).requires_grad_(False)
    choices = sparse_tree([[0.5, 0.3]] * heads, draw.of("nodes", 1, 2, 5) if heads > 1 else 2)
    return Medusa(lm, made, made.draft_heads(lm, vocabulary_K.to(lm.device)), choices)


def eagle(setting: Setting, draw: Draw) -> Drafter:
    """A chain or a tree by a head that goes on with the state it is given, changed a little."""
    lm = setting.lm
    head, size = EagleHead(lm), lm.config.hidden_size
    head.copy_layer(lm.layers[-1])
    generator = torch.Generator().manual_seed(3)
    head.join.weight.data = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    for name in ("join", "attention.o_proj", "feed_forward.down_proj"):
        weight = head.get_parameter(f"{name}.weight").data
        weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight.device)
    head.join.bias.data.zero_()
    head = head.to(lm.device, lm.dtype).requires_grad_(False)
    steps, threshold = draw.of("steps", 1, 3, 5), draw.of("eta", *THRESHOLDS)
    if draw.of("tree", True, False):
        return KangarooTree(lm, head, steps, threshold, None, 3, draw.of("nodes", 3, 9))
    return Kangaroo(lm, head, steps, threshold)


def prompt_lookup(setting: Setting, draw: Draw) -> Drafter:
    """The text's own repetitions, with documents or without."""
    reference = known(setting, draw) if draw.of("reference", True, False) else None
    return PromptLookup(draw.of("ngram", 1, 2, 3), draw.of("steps", 1, 5, 10), reference)


def rest(setting: Setting, draw: Draw) -> Drafter:
    """A tree from a datastore that has some of the texts."""
    steps, nodes = draw.of("steps", 2, 5), draw.of("nodes", 3, 9)
    return Rest(known(setting, draw), RestConfig(steps=steps, num_draft=nodes))


def lookahead(setting: Setting, draw: Draw) -> Drafter:
    """A tree from the n-grams of a Jacobi window."""
    window, ngram = draw.of("window", 1, 4), draw.of("ngram", 2, 4)
    return Lookahead(LookaheadConfig(window=window, ngram=ngram, guesses=draw.of("guesses", 1, 3)))


def cascade(setting: Setting, draw: Draw) -> Drafter:
    """A lookup, and where it finds nothing another drafter."""
    second = {"kangaroo": kangaroo, "kangaroo_tree": kangaroo_tree, "draft_model": draft_model}
    chosen = second[draw.of("second", *second)](setting, draw)
    return Cascade(
        setting.lm, PromptLookup(2, 4, known(setting, draw)), chosen, draw.of("extend", True, False)
    )


DRAFTERS: dict[str, Build] = {
    "vanilla": lambda setting, draw: Vanilla(),
    "kangaroo": kangaroo,
    "kangaroo_tree": kangaroo_tree,
    "hybrid": hybrid,
    "draft_model": draft_model,
    "draft_verify": draft_verify,
    "medusa": medusa,
    "eagle": eagle,
    "prompt_lookup": prompt_lookup,
    "rest": rest,
    "lookahead": lookahead,
    "cascade": cascade,
}
