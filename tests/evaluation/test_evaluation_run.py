"""Whole evaluations on a tiny model: artefacts, resuming, ranks, forks, several methods."""

import json
import re
import shutil

import pytest
import torch
from evaluation_cases import evaluate_several, evaluate_tiny, shown, tiny_lm, write_questions
from helpers import adapter_for

from kangaroo import ConfigError, CorruptFile, DataError, NotLossless, PromptError, Rule, Sampling
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.tree import accept
from kangaroo.evaluation import comparison
from kangaroo.evaluation import records as store
from kangaroo.evaluation.metrics import runs
from kangaroo.evaluation.records import AGAIN, METHOD
from kangaroo.evaluation.run import Baseline
from kangaroo.models.prompts import prompt_ids
from kangaroo.utils.ranks import Ranks

BOTH = ("kangaroo", "lookup")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("bench") / "tiny.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, bench):
    output = tmp_path_factory.mktemp("finished")
    return output, evaluate_tiny(output, bench)


@pytest.fixture(scope="module")
def together(tmp_path_factory, bench):
    """A run of two drafters, in which transformers answers every third question."""
    output = tmp_path_factory.mktemp("together")
    return output, evaluate_several(output, bench, BOTH, warmup=0, hf_every=3)


@pytest.fixture
def copied(finished, tmp_path):
    for name in ("run.json", "records-0.jsonl"):
        shutil.copy(finished[0] / name, tmp_path)
    return tmp_path


def timeless(value):
    """The same without whatever a clock had a part in."""
    if isinstance(value, dict):
        names = [name for name in value if not re.search("second|speedup|provenance|load", name)]
        return {name: timeless(value[name]) for name in names}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def artefacts(output):
    texts = [[run.text for run in runs(store.read(output), name)] for name in (METHOD, "vanilla")]
    return [texts, timeless(json.loads((output / "summary.json").read_text()))]


def test_the_summary_names_its_parts_and_in_float32_texts_are_vanillas_and_transformers(finished):
    output, summary = finished
    same = {"turns": 7, "identical": 7, "hf_turns": 7, "hf_identical": 7}
    assert summary["lossless"] == same | {"forks": []} and summary["dtype"] == "float32"
    assert summary["overall"]["compression_rate"] > 1.2  # or the test would show nothing
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (summary["model"], summary["drafter"], summary["bench"]) == ("tiny", "kangaroo", "tiny")
    assert list(summary["by_task"]) == ["writing", "math", "qa", "rag"]
    parameters = sum(p.numel() for p in adapter_for(tiny_lm()).parameters())
    size = max(record.drafter_bytes for record in store.read(output))
    assert summary["drafter_cost"] == {"parameters": parameters, "bytes": size, "training": {}}
    assert size > 4 * parameters  # with its cache
    for results in (summary["overall"], *summary["by_task"].values()):
        missing = {name for name, value in results.items() if value is None}
        if results["questions"] == 1:
            assert missing == {name for name in results if name.endswith("_ci95")}  # it cannot vary
            continue
        assert not missing
        low, high = results["speedup_ci95"]
        assert 0 < low <= results["speedup"] <= high
        parts = sum(results[f"{part}_seconds"] for part in ("prefill", "draft", "verify", "host"))
        assert results["tokens_per_second"] == pytest.approx(results["tokens"] / parts)


def test_turn_two_carries_the_methods_own_answer(bench, tmp_path, monkeypatch):
    """Under the rejection rule, where it is another than vanilla's."""
    conversations = []

    def noted(tokenizer, messages):
        conversations.append([message["content"] for message in messages])
        return prompt_ids(tokenizer, messages)

    monkeypatch.setattr("kangaroo.evaluation.bench.prompt_ids", noted)
    sampling = Sampling(1.0, rule=Rule.rejection)
    evaluate_tiny(tmp_path, bench, sampling=sampling, question_end=1, warmup=0)
    first = store.read(tmp_path)[0].turns[0].runs
    assert first[METHOD].text != first["vanilla"].text
    checked, *answered = conversations  # the first turn's length comes before all
    assert answered == [checked, ["Tell me a tale.", first[METHOD].text, "Shorter."]]


def test_what_is_finished_is_not_run_again_and_other_settings_refused(finished, bench, monkeypatch):
    output, summary = finished
    (output / "summary.json").unlink()
    monkeypatch.setattr(Engine, "generate", None)
    assert evaluate_tiny(output, bench) == summary
    assert (output / "summary.json").exists()
    fix = r"max_new_tokens=16 there, 17 now\)\. Go on with the same ones, pass resume=false"
    with pytest.raises(ConfigError, match=fix):
        evaluate_tiny(output, bench, max_new_tokens=17)
    with pytest.raises(ConfigError, match=r"sampling\.temperature=0\.0 there, 0\.5 now"):
        evaluate_tiny(output, bench, sampling=Sampling(0.5))


def test_a_record_cut_short_is_asked_again_and_a_damaged_one_is_named(finished, bench, copied):
    file = copied / "records-0.jsonl"  # as `kill -9` may leave it
    first, second, third, *_ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second + third[:-20])
    evaluate_tiny(copied, bench)
    assert artefacts(copied) == artefacts(finished[0])
    file.write_text('{"question_id": 1}\n')
    with pytest.raises(CorruptFile, match=r"records-0\.jsonl', line 1 is no record"):
        evaluate_tiny(copied, bench)
    for content, fault in ("{", "Expecting"), ("[1]", "list"), ('{"settings": {}}', "'drafter_c"):
        (copied / "run.json").write_text(content)
        with pytest.raises(CorruptFile, match=rf"run\.json': {fault}.*resume=false"):
            evaluate_tiny(copied, bench)


def test_answers_of_another_revision_are_named_and_never_mixed(bench, copied, caplog):
    begun, records = copied / "run.json", copied / "records-0.jsonl"
    about = json.loads(begun.read_text())
    about["provenance"]["git_revision"] = "abc"
    begun.write_text(json.dumps(about))
    evaluate_tiny(copied, bench)
    assert "measured at git revision abc; this is" in caplog.text
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match=r"revision abc; this is .* check that revision out"):
        evaluate_tiny(copied, bench)


def test_resume_false_measures_again(bench, tmp_path, monkeypatch):
    evaluate_tiny(tmp_path, bench, question_end=1)
    evaluate_tiny(tmp_path, bench, question_end=1, max_new_tokens=5, resume=False)
    assert len(store.read(tmp_path)[0].turns[0].runs[METHOD].tokens) == 5
    monkeypatch.setattr(Engine, "generate", None)
    with pytest.raises(TypeError):
        evaluate_tiny(tmp_path, bench, question_end=1, resume=False)
    assert not (tmp_path / "summary.json").exists()  # it told of texts that are gone


def test_a_part_of_the_questions_is_taken_by_their_indices_and_baselines_left_out(bench, tmp_path):
    settings = {"question_begin": 1, "question_end": 4, "question_every": 2, "warmup": 0}
    summary = evaluate_tiny(tmp_path, bench, baselines=[Baseline.hf], **settings)
    assert [record.question_id for record in store.read(tmp_path)] == [90, 322]
    assert summary["overall"]["speedup"] is None and summary["overall"]["hf_speedup"] > 0
    with pytest.raises(ConfigError, match="question_begin=9, question_end=None select none of"):
        evaluate_tiny(tmp_path, bench, question_begin=9)


@pytest.mark.parametrize("rule", [Rule.match, Rule.rejection])
def test_sampled_texts_follow_from_the_seed(rule, bench, tmp_path):
    sampling = Sampling(0.8, top_p=0.95, rule=rule)
    settings, texts = {"sampling": sampling, "question_end": 1, "warmup": 0}, []
    for i in range(3):
        torch.rand(i)  # whatever else happens in the process
        result = evaluate_tiny(tmp_path / str(i), bench, seed=i // 2, **settings)
        records = store.read(tmp_path / str(i))
        texts.append([run.tokens for name in (METHOD, "hf") for run in runs(records, name)])
    assert texts[0] == texts[1] != texts[2]
    assert result["lossless"]["identical"] == (2 if rule is Rule.match else None)
    assert result["lossless"]["hf_identical"] is None
    assert result["overall"]["hf_tokens_per_second"] > 0


def test_answers_end_where_the_context_does_and_a_first_turn_needs_room(tmp_path, monkeypatch):
    file = write_questions(tmp_path / "one.jsonl", [{"turns": ["x" * 50]}])
    lm = tiny_lm(max_position_embeddings=120)
    settings = {"max_new_tokens": 1000, "baselines": [Baseline.vanilla], "warmup": 0}
    evaluate_tiny(tmp_path / "out", file, lm, **settings)
    (turn,) = store.read(tmp_path / "out")[0].turns
    assert turn.prompt_tokens + turn.max_new_tokens == 120
    write_questions(file, [{"turns": ["Why?"]}, {"question_id": 7, "turns": ["x" * 200]}])
    monkeypatch.setattr(Engine, "generate", None)
    with pytest.raises(PromptError, match=r"question 7, turn 1: .* the model's context is 120"):
        evaluate_tiny(tmp_path / "none", file, lm)
    assert not (tmp_path / "none").exists()


def test_an_engine_that_accepts_wrong_tokens_fails_the_run(bench, tmp_path, monkeypatch):
    """Every draft is taken as it is; vanilla drafts nothing and stays right."""

    def credulous(draft, choice_BN):
        wrong = draft.tokens_BN.roll(-1, 1)
        wrong[:, -1] = choice_BN[:, -1]
        return accept(draft, wrong)

    monkeypatch.setattr("kangaroo.engine.stepper.accept", credulous)
    with pytest.raises(NotLossless, match=r"of 7 turns leave vanilla's text .* question \d+, turn"):
        evaluate_tiny(tmp_path, bench, tiny_lm(), baselines=[Baseline.vanilla], warmup=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "bug" in {fork["label"] for fork in summary["lossless"]["forks"]}


def test_forks_between_tied_tokens_do_not_fail_the_run(bench, tmp_path, monkeypatch):
    """Tokens 2n and 2n + 1 have equal logits; the method's verification takes the other one."""
    lm = tiny_lm()
    lm.head.weight.data[1:256:2] = lm.head.weight.data[:256:2]

    def other(draft, choice_BN):
        return accept(draft, choice_BN ^ (choice_BN < 256) if draft.tree.size > 1 else choice_BN)

    monkeypatch.setattr("kangaroo.engine.stepper.accept", other)
    summary = evaluate_tiny(tmp_path, bench, lm, baselines=[Baseline.vanilla], warmup=0)
    forks = summary["lossless"]["forks"]
    assert {(fork["label"], fork["gap"]) for fork in forks} == {("near-tie", 0.0)}
    assert summary["lossless"]["identical"] == 7 - len(forks)
    assert len({(fork["question_id"], fork["turn"]) for fork in forks}) == len(forks)


def test_ranks_that_share_no_folder_are_told(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "wait", lambda ranks: None)
    with pytest.raises(DataError, match=r"holds 3 of 5 questions .* folder that all ranks share"):
        evaluate_tiny(tmp_path, bench, ranks=Ranks(0, 2), baselines=[Baseline.vanilla])


def test_each_has_its_own_folder_they_share_baselines_and_transformers_answers_every_nth(together):
    output, summaries = together
    assert [summary["drafter"] for summary in summaries] == list(BOTH)
    for a, b in zip(*(store.read(output / name) for name in BOTH), strict=True):
        for turn, other in zip(a.turns, b.turns, strict=True):
            assert turn.runs["vanilla"] == other.runs["vanilla"]
            assert turn.runs[METHOD] != other.runs[METHOD]
    for summary in summaries:
        assert summary["lossless"]["identical"] == summary["lossless"]["turns"] == 7
        records = store.read(output / summary["drafter"])
        answered = [record for record in records if "hf" in record.turns[0].runs]
        assert [record.question_id for record in answered] == [81, 322]
        theirs, ours = (sum(r.seconds for r in runs(answered, name)) for name in ("hf", METHOD))
        # it is compared on these; texts are equal, so nothing is cut
        assert summary["overall"]["hf_speedup"] == pytest.approx(theirs / ours)
        assert summary["lossless"]["hf_turns"] == summary["lossless"]["hf_identical"] == 3


def test_baselines_are_rows_beside_methods_or_one_but_not_in_a_sweep(finished, together, tmp_path):
    output, (first, _) = together
    result = comparison.compare(output)
    methods = {method["name"]: method for method in result["methods"]}
    table = {row["method"]: row for row in comparison.rows_of(result["methods"])}
    assert set(table) == {*BOTH, "vanilla", "transformers"}
    vanilla, hf = table["vanilla"], table["transformers"]
    assert vanilla["speedup"] == vanilla["CR"] == hf["vs hf"] == "1.00"
    assert vanilla["tokens/s"] == f"{first['overall']['vanilla_tokens_per_second']:.1f}"
    assert hf["lossless"] == "3/3" and vanilla["lossless"] == "7/7"
    assert vanilla["memory"] == hf["memory"] == "0B"
    assert hf["speedup"] == f"{1 / methods['vanilla']['overall']['hf_speedup']:.2f}"
    assert hf["CR"] == "1.00" and hf["CTAR(1)"] == hf["accepted"] == "-"
    comparison.write(result, tmp_path)
    size = "5 questions, 7 turns, at most 16 new tokens, greedy"
    part = "transformers answered 2 of them and is compared on these."
    for text in ((tmp_path / "report.md").read_text(), shown(result)):
        assert size in text and part in text and "kangaroo answered" not in text
    names = [method["name"] for method in comparison.compare(finished[0])["methods"]]
    assert set(names) == {"kangaroo", "vanilla", "transformers"}
    shutil.copytree(finished[0], tmp_path / "sweep/job")
    (job,) = comparison.compare(tmp_path / "sweep")["methods"]
    assert job["name"] == "job"


def test_a_run_goes_on_where_one_of_the_folders_ends(together, bench, tmp_path):
    """It was killed after the first of two lines."""
    for name, kept in zip(BOTH, (3, 2), strict=True):
        (tmp_path / name).mkdir()
        shutil.copy(together[0] / name / "run.json", tmp_path / name)
        lines = (together[0] / name / "records-0.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / name / "records-0.jsonl").write_bytes(b"".join(lines[:kept]))
    numbers, answered = [], []

    def log(metrics, step):
        assert {len(store.read(tmp_path / name)) for name in BOTH} == {step}  # if it is killed now
        assert not list(tmp_path.rglob("summary.json"))
        numbers.append(metrics)
        answered.append(step)

    summaries = evaluate_several(tmp_path, bench, BOTH, warmup=0, hf_every=3, log=log)
    assert answered == [3, 4, 5]  # so that a run that goes on logs at the steps that come next
    assert {name.split(".")[0] for name in numbers[0]} == set(BOTH)
    assert [summary["questions"] for summary in summaries] == [5, 5]
    assert numbers[-1]["lookup.speedup"] == summaries[1]["overall"]["speedup"]


def test_two_methods_of_one_name_are_refused(bench, tmp_path):
    for names in (("x", "x"), ("kangaroo", "vanilla"), ("transformers", "x")):
        with pytest.raises(ConfigError, match=r"two of the methods are called '\w+'"):
            evaluate_several(tmp_path, bench, names)
    assert not list(tmp_path.iterdir())
    # a baseline that is named twice is one
    twice = [Baseline.vanilla] * 2
    evaluate_several(tmp_path, bench, BOTH, baselines=twice, question_end=1, warmup=0)


def test_who_goes_first_changes_and_all_have_the_same_prompts(bench, tmp_path, monkeypatch):
    generate, prompts = Engine.generate, []

    def noted(engine, texts, *settings, **options):
        prompts.append((type(engine.drafter).__name__, tuple(texts[0])))
        return generate(engine, texts, *settings, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    settings = {"warmup": 0, "question_begin": 1, "question_end": 3}
    evaluate_several(tmp_path, bench, BOTH, baselines=[Baseline.vanilla], **settings)
    order = ["Vanilla", "Kangaroo", "PromptLookup"]
    assert [name for name, _ in prompts] == [*order, *order, *order[::-1]]
    for turn in (prompts[:3], prompts[3:6], prompts[6:]):
        assert len({prompt for _, prompt in turn}) == 1


def test_vanilla_may_be_a_method_that_tells_what_noise_does(tmp_path, bench):
    settings = {"baselines": [Baseline.vanilla], "drafters": [Vanilla()]}
    (again,) = evaluate_several(tmp_path, bench, [AGAIN], **settings)
    assert again["overall"]["compression_rate"] == 1 and again["lossless"]["identical"] == 7
    for record in store.read(tmp_path):
        for turn in record.turns:  # another decoding, not the baseline's numbers
            assert turn.runs[METHOD].seconds != turn.runs["vanilla"].seconds
    assert comparison.conclusion(comparison.compare(tmp_path)) == ""
