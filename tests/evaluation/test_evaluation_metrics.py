"""Metrics of one method, from records written by hand; what its drafter adds in memory; and forks:
found, judged by teacher forcing, told apart from bugs."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation_cases import finish, hf_run, record, run, shown, summarised, vanilla_run
from helpers import adapter_for, chain_of, forward_logits, random_prompts, tiny, vanilla_texts
from torch import nn

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling, combine, pick
from kangaroo.evaluation import comparison, summary
from kangaroo.evaluation import metrics as figures
from kangaroo.evaluation.lossless import fork, judge, scores
from kangaroo.evaluation.metrics import METRICS, Metric, estimate, metrics, pairs, runs, scalars
from kangaroo.evaluation.records import Fork
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.memory import Footprint, footprint

GREEDY = Sampling()


def pair():
    """Rounds: 3 drafted, 2 accepted; 2 drafted, none accepted; 3 drafted, all accepted."""
    return run([3, 1, 4], [2, 0, 3], [3, 2, 3], [1.0, 1.0, 2.0]), vanilla_run(8)


def test_metrics_of_one_question_by_hand():
    method, _ = pair()
    m = metrics([record(1, (method, vanilla_run(8, retokenised=7)))])
    assert m["compression_rate"] == 8 / 3 == pytest.approx(1 + sum(m["ctar"]))
    assert m["ctar"] == [2 / 3, 2 / 3, 1 / 3] and m["acceptance_rate"] == 5 / 8
    speeds = {"tokens_per_second": 8 / 5, "vanilla_tokens_per_second": 8 / 9}
    assert {name: m[name] for name in speeds} == speeds and m["hf_tokens_per_second"] is None
    assert m["speedup"] == pytest.approx(9 / 5)
    assert m["decoding_speedup"] == pytest.approx(8 / 4)
    # Spec-Bench counts vanilla by its text, which has 6 tokens and the BOS that tokenizers add
    assert m["spec_bench_speedup"] == pytest.approx((8 / 5) / (6 / 9))
    parts = [m[f"{part}_seconds"] for part in ("prefill", "draft", "verify", "host")]
    assert parts == pytest.approx([1, 1.6, 1.6, 0.8])


def test_what_became_of_drafts_by_vllms_names():
    rounds = run([1, 3, 1, 4], [0, 2, 0, 3], [0, 3, 2, 4], [0.0, 1.0, 1.0, 2.0])
    records = [record(1, (rounds, vanilla_run(9)))]
    shares = {"mean_acceptance_length": 1 + 5 / 3, "draft_acceptance_rate": 5 / 9}
    counts = {"num_spec_steps": 3, "num_accepted_draft_tokens": 5, "num_draft_tokens": 9}
    # a place for each length that a draft may have, as clients want it: none was accepted whole
    by_length = {"num_spec_tokens": 4, "acceptance_histogram": [1, 0, 1, 1, 0]}
    by_position = {"per_position_acceptance_rate": [2 / 3, 2 / 3, 1 / 3]}
    assert metrics(records)["speculative_decoding"] == shares | counts | by_length | by_position
    assert pairs(records, "mean_acceptance_length").tolist() == [[8, 3]]


def test_what_a_metric_divides_adds_up_to_it_and_others_are_refused():
    methods = [run([3, 1 + i], [2, i], [3, 4], [1.0, i]) for i in range(4)]
    some = [record(i, (each, vanilla_run(4 + i))) for i, each in enumerate(methods)]
    assert [estimate(pairs(some, f"ctar{w}")).value for w in (1, 2, 3)] == metrics(some)["ctar"]
    assert pairs(some, "compression_rate").tolist() == [[4, 2], [5, 2], [6, 2], [7, 2]]
    for metric in ("speed", "ctar", "ctarx"):
        with pytest.raises(ConfigError, match=f"there is no '{metric}'; there are speedup"):
            pairs(some, metric)


def test_both_sides_are_timed_up_to_the_same_number_of_tokens():
    """The method forked and wrote an EOS after 4 tokens, vanilla went on to 8; a round that the
    count cuts counts in proportion, and so does a text that tells no rounds."""
    method = run([2, 4], [1, 3], [3, 3], [1.0, 2.0], prefill=0.5)
    assert [figures.seconds_until(method, n) for n in (2, 3, 6)] == pytest.approx([1.5, 2.0, 3.5])
    some = record(1, (run([4], [3], [3], [2.0]), vanilla_run(8)))
    assert figures.paired_seconds(some) == pytest.approx((1 + 4, 1 + 2))
    some.turns[0].runs["hf"] = hf_run(10, 20.0)  # its share of 4 tokens is 8 seconds
    assert figures.paired_seconds(some, "hf") == pytest.approx((8, 3))
    m = metrics([some, some])
    assert m["hf_speedup"] == pytest.approx(8 / 3)
    assert m["hf_speedup_ci95"] == pytest.approx([8 / 3, 8 / 3])


def test_the_interval_holds_what_it_says():
    """Of runs on other questions, about 95 of 100 have the true speedup in their interval."""
    rng, inside = np.random.default_rng(3), 0
    assert estimate(np.ones((1, 2))) == (1, None)
    for _ in range(200):
        vanilla = rng.uniform(1, 3, 60)
        truth = 1 / np.exp(-0.4 + 0.3**2 / 2)
        _, (low, high) = estimate(np.stack([vanilla, vanilla / rng.lognormal(0.4, 0.3, 60)], 1))
        inside += low <= truth <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_a_question_is_summed_over_its_turns_and_mt_benchs_categories_are_one_task():
    some = record(7, *[(run([4], [3], [5], [2.0]), vanilla_run(8))] * 2, category="writing")
    seconds = {"paired_seconds": 6.0, "vanilla_paired_seconds": pytest.approx(10.0)}
    assert summary.question_seconds(some) == {"question_id": 7, "task": "mt_bench"} | seconds
    assert metrics([some])["speedup"] == pytest.approx(10 / 6)
    result = summarised([some, record(1, pair(), category="math"), record(3, pair())])
    counts = {task: m["questions"] for task, m in result["by_task"].items()}
    assert counts == {"mt_bench": 2, "qa": 1} and result["overall"]["questions"] == 3


def test_a_metric_that_is_added_in_one_place_is_in_every_result(tmp_path, monkeypatch):
    def compute(records):
        return max(max(run.emitted) for run in runs(records))

    longest = Metric("longest_round", compute=compute, heading="longest", show=str)
    monkeypatch.setattr(figures, "METRICS", [*METRICS, longest])
    records = [record(1, pair()), record(2, pair(), category="rag")]
    result = summarised(records)
    assert result["overall"]["longest_round"] == result["by_task"]["rag"]["longest_round"] == 4
    assert scalars(result["overall"])["longest_round"] == 4  # what W&B takes
    finish(tmp_path / "kangaroo", records)
    compared = comparison.compare(tmp_path)
    assert " longest |" in comparison.markdown(compared) and "longest" in shown(compared)
    intervals = {"speedup_ci95": [1.1, 1.3], "hf_speedup_ci95": None, "ctar": [0.5]}
    assert scalars(intervals) == {"speedup_ci95_low": 1.1, "speedup_ci95_high": 1.3}


def footprint_of(lm, drafter):
    engine = Engine(lm, drafter)
    engine.generate(random_prompts(5), 8)
    return footprint(drafter, [lm, engine.session.batch])


def test_kangaroos_adapter_cache_and_states_count_and_the_shared_head_does_not():
    lm = tiny()
    assert footprint_of(lm, Vanilla()) == Footprint(0, 0)
    adapter = adapter_for(lm)
    drafter = chain_of(lm, adapter, threshold=0.0)
    parameters = sum(p.numel() for p in adapter.parameters())
    weights = sum(x.nbytes for x in (*adapter.parameters(), *adapter.buffers()))
    assert footprint(drafter, [lm]) == Footprint(parameters, weights)
    after = footprint_of(lm, drafter)
    states = drafter.shallow_BWD.untyped_storage().nbytes() + drafter.deep_BSD.nbytes
    assert after == Footprint(parameters, weights + drafter.cache.bytes() + states)


def test_every_container_is_searched_and_every_piece_of_memory_counts_once(tmp_path):
    @dataclass
    class Store:
        entries: dict[str, object] = field(default_factory=dict)

    mapped = np.memmap(tmp_path / "store", np.int32, "w+", shape=(6,))
    weight, table = nn.Linear(3, 2, bias=False), torch.zeros(10)
    views = [table[:3], (table[5:],)]
    store = Store({"mapped": mapped[2:], "views": views, "again": weight.weight})
    drafter = SimpleNamespace(store=store, layers=nn.ModuleList([weight]), array=np.zeros(4))
    drafter.itself = drafter
    assert footprint(drafter, []) == Footprint(6, 6 * 4 + 10 * 4 + 6 * 4 + 4 * 8)
    assert footprint(drafter, [{"theirs": table[1:2]}, weight]).bytes == 6 * 4 + 4 * 8


def logits(*values):
    """A vocabulary of ten tokens; those not given are far below."""
    return torch.tensor([*values, *[-5.0] * (10 - len(values))])


def label(logits_V, method, vanilla, dtype, sampling=GREEDY, seed=0):
    return judge(logits_V, method, vanilla, dtype, sampling, seed, position=40)


@pytest.mark.parametrize(
    "values, method, vanilla, dtype, judged",
    [
        ((16.0, 15.875), 1, 0, torch.bfloat16, (0.125, "near-tie")),
        ((16.0, 15.875), 0, 1, torch.bfloat16, (0.125, "near-tie")),
        ((16.0, 15.0), 1, 0, torch.bfloat16, (1.0, "bug")),
        # float32 explains next to nothing
        ((16.0, 15.875), 1, 0, torch.float32, (0.125, "bug")),
        ((16.0, 15.9995), 1, 0, torch.float32, (pytest.approx(5e-4, rel=0.1), "near-tie")),
        # both tokens are equally good, but a third would have been chosen
        ((12.0, 12.0, 16.0), 1, 0, torch.bfloat16, (4.0, "bug")),
        ((16.0, 16.0, 16.0), 2, 1, torch.bfloat16, (0.0, "near-tie")),
    ],
)
def test_tokens_within_rounding_are_a_near_tie_with_its_gap(values, method, vanilla, dtype, judged):
    assert label(logits(*values), method, vanilla, dtype) == judged


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7), Sampling(1.0, top_p=0.8, top_k=5)])
def test_scores_are_what_the_choice_is_made_by(sampling):
    """`judge` repeats the noise of `sampling.choose`; this holds them together."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        logits_V = 3 * torch.randn(50, generator=generator)
        place, seeds = torch.tensor([[seed + 7]]), torch.tensor([seed])
        chosen = pick(logits_V[None, None], place, combine([sampling]), seeds)
        assert scores(logits_V, sampling, seed, seed + 7).argmax() == chosen


def test_a_token_at_the_edge_of_a_filter_is_no_bug():
    """Tokens 2 and 3 tie for the third place of top-k; rounding decides which of them stays."""
    sampling = Sampling(1.0, top_k=3)
    logits_V = logits(8.0, 8.0, 7.9, 7.88)
    seed = next(  # one under which the token that is filtered out would win
        seed
        for seed in range(1000)
        if scores(torch.zeros(10), Sampling(1.0), seed, 40).argmax() == 3
        and scores(logits_V, sampling, seed, 40).argmax() == 2
    )
    # the filter removed it, so it has no score and no gap
    assert label(logits_V, 3, 2, torch.bfloat16, sampling, seed) == (None, "near-tie")


def test_a_sampled_fork_is_judged_with_the_noise_of_its_place_and_an_early_end_is_a_bug():
    lm, sampling = tiny(), Sampling(1.0, seed=4)
    (prompt,) = random_prompts(9)
    vanilla = vanilla_texts(lm, [prompt], 12, sampling)[0][len(prompt) :]
    other = (vanilla[5] + 1) % 64
    difference = fork(lm, prompt, [*vanilla[:5], other], vanilla, sampling, seed=4)
    scores_V = scores(forward_logits(lm, prompt + vanilla[:5])[-1], sampling, 4, len(prompt) + 5)
    assert scores_V.argmax() == vanilla[5] and (difference.position, difference.label) == (5, "bug")
    assert difference.gap == pytest.approx(float(scores_V.max() - scores_V[other]), abs=1e-4)
    assert fork(lm, prompt, vanilla[:2], vanilla, GREEDY, 0) == Fork(2, None, "bug")
    assert fork(lm, prompt, vanilla, vanilla, GREEDY, 0) is None
