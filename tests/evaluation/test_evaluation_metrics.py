"""Metrics of one method, from records written by hand, and what its drafter adds in memory."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation_cases import finish, hf_run, record, run, shown, summarised, vanilla_run
from helpers import adapter_for, chain_of, random_prompts, tiny
from torch import nn

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison, summary
from kangaroo.evaluation import metrics as figures
from kangaroo.evaluation.metrics import METRICS, Metric, estimate, metrics, pairs, runs, scalars
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.memory import Footprint, footprint


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
    compute = lambda records: max(max(run.emitted) for run in runs(records))  # noqa: E731
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
