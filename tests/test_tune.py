"""Tuning: what is searched, what rounds take, and that what is written is what was found."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import python
from evaluation_records import run
from helpers import adapter_for, random_prompts, tiny
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_commands import questions
from test_replay import rounds, rounds_of

from kangaroo import cli
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.records import Run
from kangaroo.evaluation.tune import costs
from kangaroo.evaluation.tune.bench import trace_bench
from kangaroo.evaluation.tune.candidates import (
    KINDS,
    Candidate,
    SearchSpace,
    candidates,
    chain,
    shipped,
    sources,
)
from kangaroo.evaluation.tune.costs import KNOTS, RoundCosts, Sample, fit, prefill_costs
from kangaroo.evaluation.tune.measuring import in_turns, spread
from kangaroo.evaluation.tune.player import VANILLA, Player, score, vanilla_seconds
from kangaroo.evaluation.tune.recording import Recorder
from kangaroo.evaluation.tune.replay import Replay
from kangaroo.evaluation.tune.report import write_settings
from kangaroo.evaluation.tune.trace import TracedQuestion, Turn
from kangaroo.evaluation.tune.tune import TuneConfig, best_by_task, split
from kangaroo.heads import adapter_files
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.loading import TINY, Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError

UNTRAINED = "untrained:2"
SPACE = SearchSpace(
    drafters=list(KINDS),
    adapters=[UNTRAINED],
    vocabularies=[],
    thresholds=[0.0, 0.6],
    steps=[1, 4],
    paces=[1.0],
    nodes=[5],
    lookups=[3],
    top_k=2,
    tree_nodes=[3],
)
VERIFY = VerifyCosts([1, 2, 4, 8, 16, 32], [0.020, 0.020, 0.021, 0.022, 0.030, 0.060])
COSTS = RoundCosts(
    prefill=[0.01, 0.0005],
    draft=[0.0002, 0.003, 0.002, 0.0001],
    verify=[0.018, 0.019, 0.020, 0.022, 0.024, 0.032, 0.060],
    context=1e-6,
    host=0.0003,
)


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny().compile_for_decoding()


@pytest.fixture(scope="module")
def traced(lm) -> list[TracedQuestion]:
    found = sources(lm, "tiny", SPACE)
    recorder = Recorder(
        lm, {k: own for source in found.values() for k, own in source.traced.items()}
    )
    turns = [recorder.turn(prompt, 16) for prompt in [*random_prompts(9, 20), [5, 9, 5, 9, 5]]]
    return [TracedQuestion(i, "qa", [turn]) for i, turn in enumerate(turns)]


def test_every_candidate_decodes_as_it_is_replayed(lm, traced):
    player = Player(lm, sources(lm, "tiny", SPACE))
    kinds = set()
    for candidate in [VANILLA, *candidates(SPACE, list(player.sources.values()))]:
        kinds.add(candidate.kind)
        engine = Engine(lm, candidate.config.build(lm))
        for question in traced:
            (turn,) = question.turns
            (decoded,) = engine.generate([turn.prompt], 16)
            assert rounds(player.of(candidate)(turn)) == rounds_of(decoded), candidate.name
    assert kinds == {"vanilla", *KINDS}


def test_candidates_differ_and_chains_of_one_token_are_tried_once(lm):
    found = candidates(SPACE, list(sources(lm, "tiny", SPACE).values()))
    assert len({one.name for one in found}) == len(found)
    chains = [one.config for one in found if one.kind == "kangaroo"]
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


def test_costs_are_kept_for_the_same_run_alone(tmp_path: Path):
    file, known = tmp_path / "costs.json", {("kangaroo", "a"): COSTS, ("vanilla", None): COSTS}
    assert costs.load(file, "key") is None
    costs.save(file, "key", known, (3, 4))
    assert costs.load(file, "key") == (known, (3, 4))
    assert costs.load(file, "another") is None


def test_what_no_trace_tells_is_not_foreseen(lm):
    player = Player(lm, sources(lm, "tiny", SPACE))
    (name,) = player.sources
    known = KangarooConfig(adapter=UNTRAINED, steps=4)
    assert player.knows(Candidate(known, name))
    assert not player.knows(Candidate(replace(known, steps=5), name))
    assert not player.knows(Candidate(known, None))
    lookup = PromptLookupConfig()
    assert player.knows(Candidate(CascadeConfig(first=lookup, second=known), name))
    assert not player.knows(Candidate(CascadeConfig(first=lookup, second=known, extend=True), name))
    tree = KangarooTreeConfig(adapter=UNTRAINED, steps=4, top_k=2)
    assert player.knows(Candidate(tree, name))
    assert not player.knows(Candidate(replace(tree, top_k=3), name))
    assert not player.knows(Candidate(replace(lookup, reference="somewhere")))


def test_a_drafter_that_no_trace_can_replay_is_refused():
    with pytest.raises(ConfigError, match=r"search\.drafters has 'medusa'"):
        SearchSpace(drafters=["kangaroo", "medusa"]).check()


def made_of(own: RoundCosts, seed: int, noise: float = 0.0, cascade: bool = False) -> Sample:
    """A turn whose rounds take what these costs say, but for a few that the machine held up."""
    rng, replayed = np.random.default_rng(seed), Replay()
    prompt_tokens, at = int(rng.integers(20, 600)), 1
    for _ in range(40):
        count = int(rng.integers(0 if cascade else 1, 9))
        right = int(rng.integers(0, count + 1))
        replayed.add(at, right, 1000, count, 0 if cascade and count > 4 else count)
        at += right + 1
    run = Run([], "", "length", 0, 0.0, *(list(part) for part in rounds(replayed)), [], [], [])
    for number in range(len(replayed.emitted)):
        one = Replay(*([0, values[number]] for values in asdict(replayed).values()))
        late = rng.random() < noise
        reading = prompt_tokens if number == 1 else 0
        drafting = own.draft[0] + own.draft[3] * reading
        chain_tokens = one.chain[1]
        if chain_tokens:
            drafting += own.draft[1] + own.draft[2] * (chain_tokens - 1)
        verifying = float(np.interp(1 + one.drafted[1], KNOTS, own.verify))
        verifying += own.context * (prompt_tokens + one.begins[1])
        run.draft_seconds.append(drafting * (4 if late else 1) * (number > 0))
        run.verify_seconds.append(verifying * (4 if late else 1) * (number > 0))
        run.host_seconds.append(own.host * (number > 0))
    parts = run.draft_seconds + run.verify_seconds + run.host_seconds
    run.seconds = sum(parts) + own.prefill[0] + own.prefill[1] * prompt_tokens
    return Sample(prompt_tokens, run, replayed)


@pytest.mark.parametrize("cascade", [False, True])
def test_costs_foresee_rounds_of_another_turn_though_some_rounds_were_late(cascade):
    samples = [made_of(COSTS, seed, noise=0.05, cascade=cascade) for seed in range(8)]
    found = fit(samples, prefill_costs(samples), VERIFY)
    for seed in range(20, 25):
        other = made_of(COSTS, seed, cascade=cascade)
        foreseen = found.seconds(other.prompt_tokens, other.replay)
        assert foreseen == pytest.approx(other.run.seconds, rel=0.01)


def test_widths_that_no_round_had_take_what_is_known_of_the_machine():
    samples = [made_of(COSTS, seed) for seed in range(4)]  # at most nine tokens wide
    found = fit(samples, COSTS.prefill, VERIFY)
    scale = np.median([COSTS.verify[i] / VERIFY.at(KNOTS[i]) for i in range(1, 5)])
    assert found.verify[-1] == pytest.approx(scale * VERIFY.at(KNOTS[-1]), rel=0.1)


def test_a_wider_verification_never_takes_less():
    falling = replace(COSTS, verify=[0.020, 0.030, 0.010, 0.025, 0.024, 0.032, 0.060])
    found = fit([made_of(falling, seed) for seed in range(6)], COSTS.prefill, VERIFY)
    assert found.verify == sorted(found.verify)


def test_turns_that_are_timed_have_prompts_of_all_lengths():
    turns = [Turn([0] * length, [1] * (length % 4 + 1), {}) for length in range(1, 13)]
    lengths = [len(turn.prompt) for turn in spread(turns, 3)]  # of 9: not 4, 8 and 12
    assert lengths == [2, 6, 10]
    assert len(spread(turns, 20)) == 9
    with pytest.raises(ConfigError, match="a single token"):
        spread([turns[3]], 3)


def test_what_the_machine_does_meanwhile_is_taken_out_of_the_times():
    """Two methods on a machine that grows slower and faster, by a twentieth from run to run."""
    runs = itertools.count()

    def method(step):
        def decode(prompt, count, seed):
            pace = 1 + 0.05 * abs(next(runs) % 8 - 4)
            return run([1] * count, [0] * count, [0] * count, [0.0] + [step * pace] * (count - 1))

        return decode

    turns = [Turn([0] * 3, [1] * 20, {}) for _ in range(40)]
    seconds = defaultdict(list)
    for number, turn, decoded in in_turns([method(1.0), method(1.1)], turns):
        assert turn in turns and decoded.host_seconds[-1] == decoded.verify_seconds[-1] / 2
        seconds[number].append(decoded.verify_seconds[-1])
    assert [len(own) for own in seconds.values()] == [40, 40]
    own, others = seconds[0], seconds[1]
    assert max(own) / min(own) < 1.06 and max(others) / min(others) < 1.06  # 1.2 as it was timed
    assert np.mean(others) / np.mean(own) == pytest.approx(1.1, rel=0.005)


def test_rounds_are_compared_from_the_first_on():
    sample = made_of(COSTS, 0)
    assert sample.is_exact and sample.rounds == 41
    sample.run.accepted[7] += 1
    assert not sample.is_exact and sample.rounds == 7


def test_a_score_is_of_rounds_and_their_seconds(lm, traced):
    player = Player(lm, sources(lm, "tiny", SPACE))
    (source,) = player.sources.values()
    one, vanilla = chain(source, 0.0, 4), replace(COSTS, draft=[0.0] * 4)
    known = {("kangaroo", source.name): COSTS, ("vanilla", None): vanilla}
    found = score(one, player.of(one), traced, known, vanilla_seconds(traced, known))
    replays = [player.of(one)(question.turns[0]) for question in traced]
    tokens, forwards = (sum(map(f, (r.emitted for r in replays))) for f in (sum, len))
    assert found.compression_rate == tokens / forwards
    seconds = [
        COSTS.seconds(len(question.turns[0].prompt), replayed)
        for question, replayed in zip(traced, replays, strict=True)
    ]
    assert found.pairs_Q2[:, 1].tolist() == seconds
    low, high = found.interval
    assert low <= found.speedup <= high


def asked(**options) -> TuneConfig:
    return TuneConfig("out", **options)


def test_no_question_is_for_tuning_and_for_reporting():
    bench = load_questions(BenchConfig())
    first, again = split(bench, asked(seed=1)), split(bench, asked(seed=1))
    tuning, reporting = ({q.question_id for q in part} for part in (first.tuning, first.reporting))
    assert (len(tuning), len(reporting)) == (18, 24) and not tuning & reporting
    assert first == again != split(bench, asked(seed=2))
    for part, each in ((first.tuning, 3), (first.reporting, 4)):  # of each of the six tasks
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
    lm, tokenizer = LM(hf), byte_tokenizer()
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
    with pytest.raises(ConfigError, match=r"question-0.*another question"):
        trace_bench(recorder, tokenizer, other, 5, tmp_path, {"drafters": "a"})


CHAIN = KangarooConfig(adapter="adapters/a", steps=3, threshold=0.4, vocabulary=1024)
FOUND = [
    CHAIN,
    HybridConfig(adapter="adapters/a", steps=8, pace=1.25, nodes=7),
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
    "measure_turns=1 measure_tokens=8 search.thresholds=[0.0,0.6] search.steps=[1,3] confirm=1 "
    "search.paces=[1.5] search.nodes=[5] search.drafters=[kangaroo,hybrid] drafter.steps=3"
)


def test_the_command_tunes_and_evaluate_takes_what_it_wrote(tmp_path: Path):
    """As typed: two adapters, the page, its plots, and the drafter in use by its file."""
    lm = LM(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
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
    assert "none is in both" in page and numbers["best"] in page
    assert not set(numbers["tuning"]) & set(numbers["reporting"])
    found = {one["source"] for one in numbers["scores"]} - {None}
    assert found == {"tiny-259", "tiny-deep-259"}
    for plot in ("contour", "threshold", "exit", "tasks"):
        assert (output / f"{plot}.png").stat().st_size > 5000
    for one in numbers["confirmed"]:  # in float32 replay is exact, seconds aside
        assert one["predicted"] is not None
    assert numbers["exact_turns"][0] == numbers["exact_turns"][1] > 0
    use = "--config-dir=outputs/tune/tiny drafter=tuned model=tiny bench.path=questions.jsonl"
    options = f"{use} question_end=1 max_new_tokens=6 warmup=0 baselines=[vanilla] output=used"
    done = python("evaluate.py", *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / "used/summary.json").is_file()


def test_the_best_of_a_task_is_judged_by_this_task_alone(lm, traced):
    player = Player(lm, sources(lm, "tiny", SPACE))
    (source,) = player.sources.values()
    known = {("kangaroo", source.name): COSTS, ("vanilla", None): COSTS}
    other = [replace(question, task="rag") for question in traced[1:]]
    mixed = [traced[0], *other]
    vanilla_Q = vanilla_seconds(mixed, known)
    some = [chain(source, 0.0, 1), chain(source, 0.0, 4), chain(source, 0.6, 4)]
    scores = [score(one, player.of(one), mixed, known, vanilla_Q) for one in some]
    best = best_by_task(scores)
    assert set(best) == {"qa", "rag"}
    for task, own in best.items():
        assert own.speedup == max(one.by_task()[task].speedup for one in scores)
