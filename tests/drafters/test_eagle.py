"""EAGLE-2's tree: what is verified, by its definition. The conformance test has its texts.

Shapes: T tokens, D hidden size, V vocabulary.
"""

import pytest
import torch
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of
from helpers import eagle_for, paths_of

from kangaroo.drafters.eagle import EagleTree
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling, candidates


@torch.no_grad()
def children(lm, head, text, path, sampling, seed, count):
    """(token, confidence) of a node's candidates, by whole forwards without a cache."""
    tokens_1T = torch.tensor([[*text, *path]])
    length = tokens_1T.shape[1]
    meta = lm.chunk(0, length, row=0, n_slots=length)
    e_1TD = lm.embed(tokens_1T)
    deep_1TD = lm.norm(lm.run(e_1TD, None, meta, range(lm.n_layers))[0])
    for end in range(len(text), length + 1):  # from the pending token on it reads its own states
        before_1TD = torch.cat([torch.zeros_like(e_1TD[:, :1]), deep_1TD[:, :-1]], 1)
        deep_1TD[:, end - 1] = head(e_1TD, before_1TD, meta, None)[:, end - 1]
    logits_11V = lm.read_out(deep_1TD[:, -1:])
    tokens = candidates(logits_11V, torch.tensor([[length]]), sampling, torch.tensor([seed]), count)
    sure = logits_11V.softmax(-1).sort(descending=True).values
    return list(zip(tokens[0, 0].tolist(), sure[0, 0, :count].tolist(), strict=True))


def tree_by_definition(lm, head, text, drafter, sampling, seed):
    """The verified nodes of EAGLE-2 as paths of tokens: expansion, then reranking."""
    scores, level = {}, {(): 1.0}
    for _ in range(drafter.steps):
        offered = {
            (*path, token): score * sure
            for path, score in level.items()
            for token, sure in children(lm, head, text, path, sampling, seed, drafter.top_k)
        }
        scores |= offered
        level = dict(sorted(offered.items(), key=lambda node: -node[1])[: drafter.top_k])
    return set(sorted(scores, key=lambda path: -scores[path])[: drafter.nodes])


@pytest.mark.parametrize("nodes, rows", [(5, 2), (14, 1)])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS["sampled"]], ids=["greedy", "sampled"])
def test_the_dynamic_tree_is_the_one_of_eagle_2(monkeypatch, sampling, nodes, rows):
    lm = case_of("llama", "sampled").lm
    head = eagle_for(lm)
    drafter = EagleTree(lm, head, 3, 0, None, 3, nodes, 0.0)
    propose, beside = drafter.propose, []

    def check(batch):
        draft = propose(batch)
        for row in (row for row in range(batch.size) if not batch.done[row]):
            drafted = set(paths_of(draft, row))
            seed, text = batch.seeds[row], batch.texts[row]
            assert drafted - {()} == tree_by_definition(lm, head, text, drafter, sampling, seed)
            beside.append(sum(len(path) == 2 for path in drafted) > drafter.top_k)
        return draft

    monkeypatch.setattr(drafter, "propose", check)
    engine = Engine(lm, drafter, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=rows)
    accepted = {step.accepted for generation in done for step in generation.steps}
    assert len(accepted) > 2
    assert any(beside) == (nodes == 14)  # nodes that no level took
