"""Greedy text is vLLM's own, and what is drafted and accepted is what our engine drafts."""

import pytest
import torch
from conftest import counted, prompts, written
from folders import adapter_for, save_adapter, save_int8, save_model, tiny
from kangaroo_vllm.model import KangarooAdapter
from kangaroo_vllm.target import Below
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.heads import draft_head
from kangaroo.heads.draft_head import DraftHead, TextHead


def rounds(llm, prompt, max_tokens=48):
    """How many tokens each of its steps writes; the first step is the prefill."""
    asked = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    llm.llm_engine.add_request("only", {"prompt_token_ids": prompt}, asked)
    sizes = []
    while llm.llm_engine.has_unfinished_requests():
        sizes += [len(out.outputs[0].token_ids) for out in llm.llm_engine.step()]
    return sizes


@pytest.mark.parametrize("drafter", ["attention", "layer", "own_head", "half"])
def test_text_is_vllms_own_and_drafts_are_accepted(drafter, serve, alone):
    with serve(drafter, text_vocabulary=0) as llm:  # with it drafts depend on the texts beside
        assert [written(llm, [prompt])[0] for prompt in prompts()] == alone
        one_by_one = counted(llm)
        assert written(llm, prompts()) == alone  # in one batch
        assert counted(llm)["accepted_tokens"] == 2 * one_by_one["accepted_tokens"]
    assert one_by_one["accepted_tokens"] > 0.15 * one_by_one["draft_tokens"]


@pytest.mark.parametrize("drafter, room", [("layer", None), ("half", 0), ("half", 9)])
@pytest.mark.parametrize("steps, threshold", [(3, 0.0), (6, 0.5)])
def test_each_round_writes_what_our_engines_does(
    drafter, room, steps, threshold, lm, serve, monkeypatch
):
    monkeypatch.setattr(draft_head, "BLOCK", 1)  # else it fills up with tokens of no text
    adapter = adapter_for(lm, feed_forward=drafter == "layer")
    frequent_K = torch.arange(0, 128, 2)
    head = DraftHead(lm) if room is None else TextHead(lm, frequent_K, room)
    options = KangarooConfig(steps=steps, threshold=threshold)
    engine = Engine(lm, Kangaroo(lm, adapter, options, head))
    with serve(drafter, steps, threshold, text_vocabulary=room) as llm:
        for prompt in prompts(3):
            before = counted(llm)
            theirs = rounds(llm, prompt)
            (ours,) = engine.generate([prompt], 48)
            assert theirs == [len(step.tokens) for step in ours.steps]
            drafted = counted(llm)["draft_tokens"] - before["draft_tokens"]
            last = ours.steps[-1].drafted  # vLLM drafts beyond the end, our engine does not
            assert abs(drafted - sum(step.drafted for step in ours.steps)) <= 2 * steps - last


def test_tokens_of_the_texts_are_drafted_too(serve, alone, monkeypatch):
    """Three rows for five texts, so that texts enter and leave beside others."""
    followed, follow = [], KangarooAdapter.follow

    def follow_and_look(adapter, texts):
        follow(adapter, texts)
        followed.append([ids.tolist() for ids in texts])
        rare = {token for ids in followed[-1] for token in ids if token % 2}
        assert sorted(adapter.ids_K.tolist()) == sorted([*range(0, 128, 2), *rare])

    monkeypatch.setattr(KangarooAdapter, "follow", follow_and_look)
    rates = []
    for most, options in ((0, {"text_vocabulary": 0}), (3, {}), (2, {"max_batch": 2})):
        followed.clear()
        with serve("half", max_num_seqs=3, **options) as llm:
            assert written(llm, prompts(5)) == alone[:5]
            counts = counted(llm)
        rates.append(counts["accepted_tokens"] / counts["drafts"])
        assert max(map(len, followed), default=0) == most
        assert len(followed) <= 1 + 2 * 5  # not in each step
        if most == 3:
            begun = [ids for texts in followed for ids in texts]
            assert all(any(ids[: len(p)] == p for ids in begun) for p in prompts(5))
    assert rates[1] > 1.1 * rates[0] and rates[2] > 0


def test_no_token_runs_through_the_lower_layers_twice(serve, alone, monkeypatch):
    sizes, forward = [], Below.forward

    def counted_forward(self, input_ids, positions):
        sizes.append(len(input_ids))
        return forward(self, input_ids, positions)

    monkeypatch.setattr(Below, "forward", counted_forward)
    (prompt,) = prompts(1)
    with serve("attention") as llm:
        sizes.clear()  # of the warm-up
        assert written(llm, [prompt]) == alone[:1]
        drafts = counted(llm)["drafts"]
    # the prompt, three tokens for the first draft; then, to verify each, its last token, and again
    # three for the next draft
    assert sizes == [len(prompt)] + [1] * (3 + 4 * drafts)


def test_a_threshold_drafts_less_and_text_stays(serve, alone):
    with serve("half", steps=6, threshold=0.5) as llm:
        assert written(llm, prompts()) == alone
        few = counted(llm)
    assert few["draft_tokens"] < 0.5 * 6 * few["drafts"]


def test_the_folders_threshold_is_the_default(serve, alone):
    with serve("half", steps=6, threshold=None) as llm:
        assert written(llm, prompts()) == alone
        drafted = counted(llm)["draft_tokens"]
    with serve("half", steps=6, threshold=0.6) as llm:
        written(llm, prompts())
        assert counted(llm)["draft_tokens"] == drafted


def test_cached_prefixes_and_chunked_prompts_change_nothing(serve):
    """24 prompts with common beginnings over 4 rows, of which a step takes 48 tokens at most."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(0, 128, (150,), generator=generator).tolist()
    ids = [common[: 100 + i] + [i] * 2 for i in range(24)]
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "enable_prefix_caching": True,
    }
    with serve(threshold=None, **options) as llm:
        expected = written(llm, ids)
    with serve("attention", **options) as llm:
        assert written(llm, ids) == expected
        first = counted(llm)
        assert written(llm, ids) == expected  # whose prompts now lie in the cache
        hits = {x.name: x for x in llm.get_metrics() if x.name == "vllm:prefix_cache_hits"}
        assert hits["vllm:prefix_cache_hits"].value > 24 * 96
        again = counted(llm)["accepted_tokens"] - first["accepted_tokens"]
    # the adapter's keys lie in the cached pages too: no less is accepted
    assert again == first["accepted_tokens"]


def test_few_pages_of_cache_so_that_requests_are_preempted(serve, alone):
    ids = prompts() * 4
    options = {"block_size": 32, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    with serve("attention", **options) as llm:
        assert written(llm, ids) == alone * 4
        preempted = [x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions"]
    assert preempted[0] > 0


def test_drafts_end_where_the_context_does(serve):
    options = {"max_model_len": 64}
    with serve(threshold=None, **options) as llm:
        expected = written(llm, prompts(4), max_tokens=None)
    with serve("attention", **options) as llm:
        assert written(llm, prompts(4), max_tokens=None) == expected


def test_compiled_code_writes_the_same(serve, alone):
    with serve("half", enforce_eager=False) as llm:
        assert written(llm, prompts()) == alone
        assert counted(llm)["accepted_tokens"] > 0


def test_a_head_that_is_the_embedding_serves_both(serve, folders, tmp_path):
    tied = tiny(tie_word_embeddings=True)
    folders["tied"] = save_model(tied.hf, tmp_path / "tied")
    every_K = torch.arange(0, 128, 2)
    folders["of_tied"] = save_adapter(tied, adapter_for(tied), tmp_path / "of_tied", every_K)
    with serve(threshold=None, target="tied") as llm:
        expected = written(llm, prompts())
    with serve("of_tied", target="tied") as llm:
        assert written(llm, prompts()) == expected
        assert counted(llm)["accepted_tokens"] > 0


def test_large_batches_draft_nothing(serve, alone):
    with serve("attention", max_batch=2) as llm:
        assert written(llm, prompts(2)) == alone[:2]
        two = counted(llm)
        assert two["drafts"] > 0 and two["draft_tokens"] == 3 * two["drafts"]
        assert written(llm, prompts(6)) == alone
        # a batch shrinks to one or two texts at its end, and then drafts again
        assert counted(llm)["drafts"] - two["drafts"] < 48


def test_drafts_end_with_the_pages_that_a_row_has(serve, alone):
    """vLLM reserves no pages ahead; with pages of 32 tokens every text comes to several ends."""
    options = {"block_size": 32, "enable_prefix_caching": False}
    with serve("attention", steps=6, **options) as llm:
        assert written(llm, prompts()) == alone
        counts = counted(llm)
    assert 5 * counts["drafts"] < counts["draft_tokens"] < 6 * counts["drafts"]


@pytest.mark.parametrize("drafter", ["half", "layer"])
def test_a_quantized_target_drafts_for_itself(drafter, serve, alone, lm, folders, tmp_path):
    """Its own layers of eight bits, the adapter in float32."""
    folders["int8"] = save_int8(lm, tmp_path / "int8")
    with serve(threshold=None, target="int8") as llm:
        expected = written(llm, prompts())
    assert expected != alone
    with serve(drafter, target="int8") as llm:
        assert written(llm, prompts()) == expected
        counts = counted(llm)
    assert counts["accepted_tokens"] > 0.15 * counts["draft_tokens"]
