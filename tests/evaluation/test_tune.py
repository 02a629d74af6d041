"""Tuning: what is searched, what rounds take, and that what is written is what was found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import python, questions
from helpers import adapter_for, random_prompts, tiny
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from replayed import rounds, rounds_of

from kangaroo import cli
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.tune.candidates import (
    KINDS,
    Candidate,
    SearchSpace,
    candidates,
    shipped,
    sources,
)
from kangaroo.evaluation.tune.costs import score, steps
from kangaroo.evaluation.tune.page import write_settings
from kangaroo.evaluation.tune.recording import Recorder, trace_bench
from kangaroo.evaluation.tune.replay import Player, Replay
from kangaroo.evaluation.tune.search import TuneConfig, best_by, split
from kangaroo.evaluation.tune.trace import TracedQuestion
from kangaroo.heads import adapter_files
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.loading import TINY, Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError

UNTRAINED = "untrained:2"
SPACE = SearchSpace(
    drafters=KINDS,
    adapters=[UNTRAINED],
    vocabularies=[],
    thresholds=[0.0, 0.6],
    steps=[1, 4],
    min_gains=[1.0],
    nodes=[5],
    lookups=[3],
    top_k=2,
    tree_nodes=[3],
)
VERIFY = np.array([1.0, 1.1, 1.3, 1.6, 2.0, 2.5])  # of 0, 1, ... drafted tokens


@pytest.fixture(scope="module")
def lm() -> TargetModel:
    return tiny().compile_for_decoding()


@pytest.fixture(scope="module")
def player(lm) -> Player:
    return Player(lm, sources(lm, "tiny", SPACE))


@pytest.fixture(scope="module")
def traced(lm, player) -> list[TracedQuestion]:
    (source,) = player.sources.values()
    recorder = Recorder(lm, source.traced)
    turns = [recorder.turn(prompt, 16) for prompt in [*random_prompts(9, 20), [5, 9, 5, 9, 5]]]
    turns.append(recorder.turn([3, 1], 1))  # has no round
    return [TracedQuestion(i, "qa", [turn]) for i, turn in enumerate(turns)]


def test_every_candidate_decodes_as_it_is_replayed(lm, player, traced):
    kinds = set()
    for candidate in candidates(SPACE, player.sources):
        kinds.add(candidate.config.name)
        engine, play = Engine(lm, candidate.config.build(lm)), player.of(candidate)
        for question in traced:
            (turn,) = question.turns
            (decoded,) = engine.generate([turn.prompt], len(turn.text))
            assert rounds(play(turn)) == rounds_of(decoded), candidate.name
    assert kinds == set(KINDS)


def test_candidates_differ_and_chains_of_one_token_are_tried_once(player):
    found = candidates(SPACE, player.sources)
    assert len({one.name for one in found}) == len(found)
    chains = [one.config for one in found if one.config.name == "kangaroo"]
    assert [(c.threshold, c.steps) for c in chains] == [(0.0, 1), (0.0, 4), (0.6, 4)]


def test_an_adapter_is_tried_with_the_vocabularies_that_it_has(tmp_path: Path, lm):
    adapter, folder = adapter_for(lm), tmp_path / "a"
    adapter_files.save(adapter, adapter_files.describe(lm, adapter, {}), torch.arange(60), folder)
    space = replace(SPACE, adapters=[str(folder)], vocabularies=[30, 61])
    assert {source.drafter.head.size for source in sources(lm, "tiny", space).values()} == {30, 64}


def test_all_adapters_of_a_model_are_tried_that_kangaroo_can_use(tmp_path, monkeypatch, lm):
    monkeypatch.chdir(tmp_path)
    heads = MedusaHeads(lm, MedusaHeadsConfig(heads=2))
    for name, trained in {
        "": adapter_for(lm),
        "-deep": adapter_for(lm, 3),
        "-medusa": heads,
    }.items():
        about = adapter_files.describe(lm, trained, {})
        adapter_files.save(trained, about, None, Path("adapters", f"mine{name}"))
    assert shipped("mine") == ["adapters/mine", "adapters/mine-deep"]


def test_a_drafter_that_no_trace_can_replay_is_refused():
    with pytest.raises(ConfigError, match=r"search\.drafters has 'medusa'"):
        SearchSpace(drafters=["kangaroo", "medusa"]).check()


def test_adapters_that_results_cannot_tell_apart_are_refused(tmp_path: Path, lm):
    adapter, folders = adapter_for(lm), [tmp_path / "a/same", tmp_path / "b/same"]
    for folder in folders:
        adapter_files.save(adapter, adapter_files.describe(lm, adapter, {}), None, folder)
    with pytest.raises(ConfigError, match="cannot tell apart"):
        sources(lm, "tiny", replace(SPACE, adapters=list(map(str, folders))))


def test_rounds_cost_what_the_budget_says(player):
    (source,) = player.sources.values()
    draft, shallow = source.drafter.draft_cost, source.drafter.shallow_cost
    replay = Replay()  # the prefill, then rounds of 4, 0 and 2 tokens, the last from the text
    for drafted, chain in ((4, 3), (0, 0), (2, 0)):
        replay.add(0, 10, drafted, chain)
    from_text = VERIFY[4] + VERIFY[0] + VERIFY[2]
    assert steps(replay, VERIFY, None) == pytest.approx(from_text)
    # verification begins at the exit; below it the pending token passes by itself
    by_adapter = 3 * draft + shallow * (1 - VERIFY[4])
    assert steps(replay, VERIFY, source) == pytest.approx(from_text + by_adapter)


def test_a_score_is_of_rounds_and_what_they_take(player, traced):
    (source,) = player.sources.values()
    one = Candidate(replace(source.config, threshold=0.0, steps=4), source.name)
    found = score(one, player, traced, VERIFY)
    replays = [player.of(one)(question.turns[0]) for question in traced]
    tokens, forwards = (sum(map(f, (r.emitted for r in replays))) for f in (sum, len))
    assert found.compression_rate == tokens / forwards
    assert found.pairs_Q2.tolist() == [
        [sum(replay.emitted) - 1, steps(replay, VERIFY, source)] for replay in replays
    ]


def test_the_best_of_each_drafter_is_its_fastest(player, traced):
    scores = [score(one, player, traced, VERIFY) for one in candidates(SPACE, player.sources)]
    scores.sort(key=lambda one: -one.speedup)
    best = best_by(scores, lambda one: one.config.name)
    assert {one.candidate.config.name for one in best} == set(KINDS) and best[0] is scores[0]
    for one in best:
        same = [s for s in scores if s.candidate.config.name == one.candidate.config.name]
        assert one.speedup == max(other.speedup for other in same)


def asked(**options) -> TuneConfig:
    return TuneConfig("out", **options)


def test_no_question_is_for_tuning_and_for_reporting():
    bench = load_questions(BenchConfig())
    first, again = split(bench, asked(seed=1)), split(bench, asked(seed=1))
    tuning, reporting = ({q.question_id for q in part} for part in first)
    assert (len(tuning), len(reporting)) == (18, 24) and not tuning & reporting
    assert first == again != split(bench, asked(seed=2))
    for part, each in zip(first, (3, 4), strict=True):  # of each of the six tasks
        assert set(Counter(question.task for question in part).values()) == {each}


def test_more_questions_than_there_are_cannot_be_split():
    bench = [Question(i, "qa", ["?"]) for i in range(5)]
    with pytest.raises(ConfigError, match="no more than the 5 questions"):
        split(bench, asked(tuning_questions=3, reporting_questions=3))


class Stopped(Recorder):
    """The target answers so many turns, then the process is gone."""

    left = 0

    def turn(self, prompt, max_new_tokens):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().turn(prompt, max_new_tokens)


def test_a_trace_goes_on_where_it_was_stopped(lm, tmp_path: Path):
    hf, _ = load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))
    lm, tokenizer = TargetModel(hf), byte_tokenizer()
    drafters = {name: s.drafter for name, s in sources(lm, "tiny", SPACE).items()}
    bench = [Question(i, "qa", [f"{i}?", "And?"]) for i in range(3)]
    recorder = Stopped(lm, drafters)
    recorder.left = 3  # in the middle of the second question
    with pytest.raises(KeyboardInterrupt):
        trace_bench(recorder, tokenizer, bench, 5, tmp_path, {"drafters": "a"})
    (tmp_path / "question-1.partial").write_bytes(b"killed while writing")
    recorder.left = 4
    found = trace_bench(recorder, tokenizer, bench, 5, tmp_path, {"drafters": "a"})
    whole = trace_bench(
        Recorder(lm, drafters), tokenizer, bench, 5, tmp_path / "b", {"drafters": "a"}
    )
    assert [[(t.prompt, t.text) for t in q.turns] for q in found] == [
        [(t.prompt, t.text) for t in q.turns] for q in whole
    ]
    with pytest.raises(ConfigError, match="max_new_tokens=5 there, 6 now"):
        trace_bench(recorder, tokenizer, bench, 6, tmp_path, {"drafters": "a"})
    other = [replace(bench[0], turns=["Another?"])]
    with pytest.raises(ConfigError, match=r"question-0.*question='\w+' there, '\w+' now"):
        trace_bench(recorder, tokenizer, other, 5, tmp_path, {"drafters": "a"})


CHAIN = KangarooConfig(adapter="adapters/a", steps=3, threshold=0.4, vocabulary=1024)
FOUND = [
    CHAIN,
    HybridConfig(adapter="adapters/a", steps=8, min_gain_per_step=1.25, nodes=7),
    PromptLookupConfig(num_pred_tokens=8),
    KangarooTreeConfig(adapter="adapters/a", steps=4, threshold=0.2, top_k=3, nodes=16),
    CascadeConfig(first=PromptLookupConfig(num_pred_tokens=3), second=CHAIN),
]


@pytest.mark.parametrize("drafter", FOUND, ids=lambda drafter: drafter.name)
def test_evaluate_takes_the_settings_that_were_found(drafter, tmp_path: Path):
    write_settings(drafter, tmp_path, "python evaluate.py")
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        options = ["drafter=tuned", "output=out", f"hydra.searchpath=[file://{tmp_path}]"]
        config = compose("evaluate", options)
    assert OmegaConf.to_object(config).drafter == drafter


BRIEF = (
    "tuning_questions=2 reporting_questions=2 confirm_questions=1 max_new_tokens=8 "
    "search.thresholds=[0.0,0.6] search.steps=[1,3] confirm=1 "
    "search.min_gains=[1.5] search.nodes=[5] search.drafters=[kangaroo,hybrid] drafter.steps=3"
)


def decoded(folder: Path) -> dict[str, dict]:
    found = json.loads((folder / "comparison.json").read_text())
    return {method["name"]: method["overall"] for method in found["methods"]}


def test_the_command_tunes_and_evaluate_takes_what_it_wrote(tmp_path: Path):
    """As typed: two adapters, the page, its plots, and the drafter in use by its file."""
    lm = TargetModel(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
    for name, exit_layer in (("tiny", 2), ("tiny-deep", 3)):
        adapter = adapter_for(lm, exit_layer)
        about = adapter_files.describe(lm, adapter, {})
        adapter_files.save(adapter, about, None, tmp_path / "adapters" / name)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions())))
    command = f"model=tiny bench.path=questions.jsonl {BRIEF}"
    done = python("scripts/tune.py", *command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    output = tmp_path / "outputs/tune/tiny"
    page, numbers = (output / "tune.md").read_text(), json.loads((output / "tune.json").read_text())
    assert "none is in both" in page and f"**`{numbers['best']}`**" in page
    assert not set(numbers["tuning"]) & set(numbers["reporting"])
    tried = {one["name"].split(",")[1] for one in numbers["scores"]}
    assert tried == {"tiny-259", "tiny-deep-259"}
    report, confirmed = (decoded(output / part) for part in ("report", "confirm"))
    assert report.keys() - {"vanilla"} == {"today", numbers["best"]}
    for image in ("report/speedup.png", "confirm/speedup.png"):  # evaluate's own
        assert (output / image).stat().st_size > 5000
    assert numbers["predicted"].keys() == confirmed.keys() - {"vanilla", "today"}
    for name, one in numbers["predicted"].items():  # in float32 replay is exact, time aside
        assert one["compression_rate"] == confirmed[name]["compression_rate"]
    records = {file: file.read_bytes() for file in output.glob("*/*/records-0.jsonl")}
    next(output.glob("trace/*.safetensors")).unlink()
    done = python("scripts/tune.py", *command.split(), cwd=tmp_path)  # goes on, decoding nothing
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert records and all(file.read_bytes() == known for file, known in records.items())
    use = "--config-dir=outputs/tune/tiny drafter=tuned model=tiny bench.path=questions.jsonl"
    options = f"{use} question_end=1 max_new_tokens=6 warmup=0 baselines=[vanilla] output=used"
    done = python("evaluate.py", *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / "used/summary.json").is_file()
