"""Whole evaluations on a tiny model: artefacts, resuming, ranks, forks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from evaluation_worker import evaluate_tiny, tiny_lm
from helpers import adapter_for
from spec_bench_contract import lines, spec_bench_report

import kangaroo.engine.engine
import kangaroo.engine.verify
import kangaroo.evaluation.bench
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.evaluation import records as store
from kangaroo.evaluation.metrics import runs
from kangaroo.evaluation.records import METHOD
from kangaroo.evaluation.run import Baseline
from kangaroo.models.attention import ATTENTION
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import prompt_ids
from kangaroo.utils.errors import ConfigError, CorruptFile, NotLossless, PromptError

WORKER = Path(__file__).parent / "evaluation_worker.py"
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Tell me a tale.", "Shorter."]},
    {"question_id": 90, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
    {"question_id": 321, "category": "qa", "turns": ["Who wrote it?"]},
    {"question_id": 322, "category": "qa", "turns": ["When was that?"]},
    {"question_id": 481, "category": "rag", "turns": ["Here is a text. What does it say?"]},
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "tiny.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory, bench):
    """A complete run: its folder and its summary."""
    output = tmp_path_factory.mktemp("finished")
    return output, evaluate_tiny(output, bench)


TIMES = {
    "seconds",
    "paired_seconds",
    "vanilla_paired_seconds",
    "draft_seconds",
    "verify_seconds",
    "host_seconds",
    "prefill_seconds",
    "finished",
    "tstamp",
    "wall_time",
    "speedup",
    "speedup_ci95",
    "decoding_speedup",
    "hf_speedup",
    "hf_speedup_ci95",
    "spec_bench_speedup",
    "tokens_per_second",
    "vanilla_tokens_per_second",
    "hf_tokens_per_second",
    "provenance",
}


def timeless(value):
    """The same without whatever a clock had a part in."""
    if isinstance(value, dict):
        return {name: timeless(v) for name, v in value.items() if name not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def artefacts(output):
    return timeless(
        [
            lines(output / "answers.jsonl"),
            lines(output / "baseline.jsonl"),
            json.loads((output / "summary.json").read_text()),
        ]
    )


def test_in_float32_every_text_is_vanillas_and_transformers(finished):
    _, summary = finished
    same = {"turns": 7, "identical": 7, "hf_turns": 7, "hf_identical": 7}
    assert summary["lossless"] == same | {"forks": []}
    assert summary["dtype"] == "float32"
    assert summary["overall"]["compression_rate"] > 1.2  # or the test would show nothing


def test_the_summary_names_its_parts(finished):
    output, summary = finished
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (summary["model"], summary["drafter"], summary["bench"]) == ("tiny", "kangaroo", "tiny")
    assert summary["questions"] == 5
    assert list(summary["by_task"]) == ["writing", "math", "qa", "rag"]
    assert "python" in summary["provenance"]["versions"]
    for results in (summary["overall"], *summary["by_task"].values()):
        missing = {name for name, value in results.items() if value is None}
        if results["questions"] == 1:
            assert missing == {"speedup_ci95", "hf_speedup_ci95"}  # one cannot vary
            continue
        assert not missing
        low, high = results["speedup_ci95"]
        assert 0 < low <= results["speedup"] <= high
        parts = sum(results[f"{part}_seconds"] for part in ("prefill", "draft", "verify", "host"))
        assert results["tokens_per_second"] == pytest.approx(results["tokens"] / parts)


def test_spec_benchs_report_reads_the_files_and_finds_the_same(finished):
    output, summary = finished
    speedup, accepted = spec_bench_report(
        output / "answers.jsonl", output / "baseline.jsonl", byte_tokenizer()
    )
    assert speedup == pytest.approx(summary["overall"]["spec_bench_speedup"])
    # a turn's last round may lack the bonus token
    assert accepted == pytest.approx(summary["overall"]["compression_rate"], rel=0.1)


def test_answers_are_in_spec_benchs_schema(finished):
    output, _ = finished
    answers, baseline = lines(output / "answers.jsonl"), lines(output / "baseline.jsonl")
    assert [line["question_id"] for line in answers] == [81, 90, 321, 322, 481]
    assert {line["model_id"] for line in answers} == {"tiny-kangaroo"}
    for line in (*answers, *baseline):
        assert list(line) == [
            "question_id",
            "category",
            "answer_id",
            "model_id",
            "choices",
            "tstamp",
        ]
        (choice,) = line["choices"]
        turns = 2 if line["question_id"] < 100 else 1
        for name in ("turns", "decoding_steps", "new_tokens", "wall_time"):
            assert len(choice[name]) == turns
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    for line in baseline:
        assert set(line["choices"][0]["accept_lengths"]) == {1}


def test_turn_two_carries_the_methods_own_answer(bench, tmp_path, monkeypatch):
    """Under the rejection rule, where it is another than vanilla's."""
    asked = []

    def noted(tokenizer, messages):
        asked.append([message["content"] for message in messages])
        return prompt_ids(tokenizer, messages)

    monkeypatch.setattr(kangaroo.evaluation.bench, "prompt_ids", noted)
    sampling = Sampling(1.0, rule=Rule.rejection)
    evaluate_tiny(tmp_path, bench, sampling=sampling, question_end=1, warmup=0)
    first = store.read(tmp_path)[0].turns[0].runs
    assert first[METHOD].text != first["vanilla"].text
    checked, *answered = asked  # the first turn's length comes before all
    assert answered == [checked, ["Tell me a tale.", first[METHOD].text, "Shorter."]]


def test_a_finished_run_is_not_run_again_and_its_artefacts_can_be_remade(
    finished, bench, monkeypatch
):
    output, summary = finished
    for name in ("answers.jsonl", "summary.json", "report.md"):
        (output / name).unlink()
    monkeypatch.setattr(kangaroo.engine.engine.Engine, "generate", None)
    assert evaluate_tiny(output, bench) == summary
    assert (output / "report.md").exists()


def test_a_record_cut_short_is_asked_again(finished, bench, tmp_path):
    output, _ = finished
    whole = (output / "records-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run.json").write_text((output / "run.json").read_text())
    (tmp_path / "records-0.jsonl").write_bytes(b"".join(whole[:2]) + whole[2][:-20])
    evaluate_tiny(tmp_path, bench)
    assert artefacts(tmp_path) == artefacts(output)


def test_answers_of_another_revision_are_named_and_never_mixed(finished, bench, tmp_path, caplog):
    output, _ = finished
    for name in ("run.json", "records-0.jsonl"):
        (tmp_path / name).write_text((output / name).read_text())
    begun = json.loads((tmp_path / "run.json").read_text())
    begun["provenance"]["git_revision"] = "abc"
    (tmp_path / "run.json").write_text(json.dumps(begun))
    evaluate_tiny(tmp_path, bench)
    assert "measured at git revision abc; this is" in caplog.text
    lines = (tmp_path / "records-0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records-0.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(
        ConfigError, match=r"at git revision abc; this is .* check that revision out"
    ):
        evaluate_tiny(tmp_path, bench)


def test_a_damaged_record_is_named(finished, bench, tmp_path):
    output, _ = finished
    (tmp_path / "run.json").write_text((output / "run.json").read_text())
    (tmp_path / "records-0.jsonl").write_text('{"question_id": 1}\n')
    with pytest.raises(CorruptFile, match=r"records-0\.jsonl', line 1 is no record"):
        evaluate_tiny(tmp_path, bench)


def test_kill_9_in_the_middle_changes_nothing(finished, bench, tmp_path):
    process = subprocess.Popen([sys.executable, WORKER, tmp_path, bench], stderr=subprocess.DEVNULL)
    file = tmp_path / "records-0.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "summary.json").exists()
    evaluate_tiny(tmp_path, bench)
    assert artefacts(tmp_path) == artefacts(finished[0])


def test_other_settings_are_refused_by_name(finished, bench):
    output, _ = finished
    fix = r"max_new_tokens=16 there, 17 now\. Pass another output=, or resume=false"
    with pytest.raises(ConfigError, match=fix):
        evaluate_tiny(output, bench, max_new_tokens=17)
    with pytest.raises(ConfigError, match=r"sampling\.temperature=0\.0 there, 0\.5 now"):
        evaluate_tiny(output, bench, sampling=Sampling(0.5))


def test_resume_false_measures_again(bench, tmp_path, monkeypatch):
    evaluate_tiny(tmp_path, bench, question_end=1)
    before = store.read(tmp_path)[0].finished
    evaluate_tiny(tmp_path, bench, question_end=1, max_new_tokens=5, resume=False)
    (record,) = store.read(tmp_path)
    assert record.finished > before
    assert len(record.turns[0].runs[METHOD].tokens) == 5
    monkeypatch.setattr(kangaroo.engine.engine.Engine, "generate", None)
    with pytest.raises(TypeError):
        evaluate_tiny(tmp_path, bench, question_end=1, resume=False)
    assert not (tmp_path / "summary.json").exists()  # it told of texts that are gone


def test_question_begin_and_end_are_indices(bench, tmp_path):
    evaluate_tiny(tmp_path, bench, question_begin=1, question_end=3)
    assert [record.question_id for record in store.read(tmp_path)] == [90, 321]
    with pytest.raises(
        ConfigError, match="question_begin=9, question_end=None select none of the 5"
    ):
        evaluate_tiny(tmp_path, bench, question_begin=9)


def test_question_every_takes_each_nth_of_the_range(bench, tmp_path):
    evaluate_tiny(tmp_path, bench, question_begin=1, question_every=2, warmup=0)
    assert [record.question_id for record in store.read(tmp_path)] == [90, 322]
    with pytest.raises(ConfigError, match="question_every=2 there, 3 now"):
        evaluate_tiny(tmp_path, bench, question_begin=1, question_every=3)


def test_a_run_of_before_a_setting_existed_is_refused_by_its_name(bench, tmp_path):
    evaluate_tiny(tmp_path, bench, question_end=1, warmup=0)
    about = json.loads((tmp_path / "run.json").read_text())
    del about["settings"]["question_every"], about["drafter_cost"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="question_every=None there, 1 now"):
        evaluate_tiny(tmp_path, bench, question_end=1)


def test_the_summary_tells_what_the_drafter_adds(finished):
    output, summary = finished
    cost = summary["drafter_cost"]
    lm = tiny_lm()
    adapter = adapter_for(lm)
    assert cost["parameters"] == sum(p.numel() for p in adapter.parameters())
    assert cost["bytes"] == max(record.drafter_bytes for record in store.read(output))
    cache = 2 * 4 * lm.config.num_key_value_heads * lm.config.head_dim  # of one slot, at least
    assert cost["bytes"] > 4 * cost["parameters"] + 100 * cache
    assert cost["training"] == {}


@pytest.mark.parametrize("rule", Rule)
def test_sampled_texts_follow_from_the_seed(rule, bench, tmp_path):
    sampling = Sampling(0.8, top_p=0.95, rule=rule)
    results = [
        evaluate_tiny(
            tmp_path / str(i), bench, sampling=sampling, seed=i // 2, question_end=2, warmup=0
        )
        for i in range(3)
    ]
    texts = [lines(tmp_path / str(i) / "answers.jsonl") for i in range(3)]
    turns = [[line["choices"][0]["turns"] for line in some] for some in texts]
    assert turns[0] == turns[1] != turns[2]
    found = results[0]["lossless"]
    assert found["identical"] == (4 if rule is Rule.match else None)
    assert found["hf_identical"] is None
    assert results[0]["overall"]["hf_tokens_per_second"] > 0


def test_sampled_hf_texts_follow_from_the_seed_too(bench, tmp_path):
    for i in range(2):
        torch.rand(i)  # whatever else happens in the process
        evaluate_tiny(tmp_path / str(i), bench, sampling=Sampling(1.0), question_end=1)
    first, second = (runs(store.read(tmp_path / str(i)), "hf") for i in range(2))
    assert [run.tokens for run in first] == [run.tokens for run in second]


def test_answers_end_where_the_context_does(bench, tmp_path):
    question = {"question_id": 1, "category": "qa", "turns": ["x" * 50]}
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(question))
    lm = tiny_lm(max_position_embeddings=120)
    evaluate_tiny(tmp_path / "out", file, lm, max_new_tokens=1000)
    (turn,) = store.read(tmp_path / "out")[0].turns
    assert turn.prompt_tokens + turn.max_new_tokens == 120
    question["turns"] = ["x" * 200]
    file.write_text(json.dumps(question))
    with pytest.raises(PromptError, match=r"question 1, turn 0 has .* the model's context is 120"):
        evaluate_tiny(tmp_path / "other", file, lm)


def test_a_first_turn_without_room_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    questions = [QUESTIONS[0], {"question_id": 7, "turns": ["x" * 200]}]
    file = tmp_path / "two.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)))
    monkeypatch.setattr(kangaroo.engine.engine.Engine, "generate", None)
    with pytest.raises(PromptError, match=r"question 7, turn 0 has .* the model's context is 120"):
        evaluate_tiny(tmp_path / "out", file, tiny_lm(max_position_embeddings=120))
    assert not (tmp_path / "out").exists()


def test_a_question_may_be_numbered_by_the_time_in_nanoseconds(tmp_path):
    file = tmp_path / "big.jsonl"
    file.write_text(json.dumps(QUESTIONS[2] | {"question_id": 1732579200000000000}))
    summary = evaluate_tiny(tmp_path / "out", file, sampling=Sampling(1.0), warmup=0)
    assert summary["lossless"]["identical"] == 1


def test_a_categorys_name_breaks_neither_tables_nor_plots(bench, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(QUESTIONS[2] | {"category": r"a|b [x] $\frac{$"}))
    evaluate_tiny(tmp_path / "out", file, warmup=0, baselines=[Baseline.vanilla])
    assert r"| a\|b [x] $\frac{$ | 1 |" in (tmp_path / "out/report.md").read_text()


def test_who_goes_first_alternates(bench, tmp_path, monkeypatch):
    calls = []
    generate = kangaroo.engine.engine.Engine.generate

    def noted(engine, *args, **kwargs):
        calls.append("vanilla" if isinstance(engine.drafter, Vanilla) else "method")
        return generate(engine, *args, **kwargs)

    monkeypatch.setattr(kangaroo.engine.engine.Engine, "generate", noted)
    evaluate_tiny(tmp_path, bench, question_begin=2, question_end=4, warmup=0)
    assert calls == ["vanilla", "method", "method", "vanilla"]


def test_the_model_has_the_engines_attention_after_hf_failed(bench, tmp_path, monkeypatch):
    lm = tiny_lm()

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(lm.hf, "generate", fail)
    with pytest.raises(RuntimeError, match="no"):
        evaluate_tiny(tmp_path, bench, lm)
    assert lm.config._attn_implementation == ATTENTION


def test_baselines_can_be_left_out(bench, tmp_path):
    summary = evaluate_tiny(tmp_path, bench, baselines=[Baseline.hf], question_end=1)
    assert summary["overall"]["speedup"] is None
    assert summary["overall"]["hf_tokens_per_second"] > 0
    assert not (tmp_path / "baseline.jsonl").exists()


def test_an_engine_that_accepts_wrong_tokens_fails_the_run(bench, tmp_path, monkeypatch):
    """Every draft is taken as it is; vanilla drafts nothing and stays right."""
    accept = kangaroo.engine.verify.accept

    def credulous(draft, choice_BN):
        wrong = draft.tokens_BN.roll(-1, 1)
        wrong[:, -1] = choice_BN[:, -1]
        return accept(draft, wrong)

    monkeypatch.setattr(kangaroo.engine.verify, "accept", credulous)
    with pytest.raises(NotLossless, match=r"of 7 turns leave vanilla's text .* question \d+, turn"):
        evaluate_tiny(tmp_path, bench)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "bug" in {fork["label"] for fork in summary["lossless"]["forks"]}
    assert "not explained" in (tmp_path / "report.md").read_text()


def test_forks_between_tied_tokens_do_not_fail_the_run(bench, tmp_path, monkeypatch):
    """Tokens 2n and 2n + 1 have equal logits; the method's verification takes the other one."""
    lm = tiny_lm()
    lm.head.weight.data[1:256:2] = lm.head.weight.data[:256:2]
    accept = kangaroo.engine.verify.accept

    def other(draft, choice_BN):
        return accept(draft, choice_BN ^ (choice_BN < 256) if draft.tree.size > 1 else choice_BN)

    monkeypatch.setattr(kangaroo.engine.verify, "accept", other)
    summary = evaluate_tiny(tmp_path, bench, lm)
    forks = summary["lossless"]["forks"]
    assert forks
    assert {(fork["label"], fork["gap"]) for fork in forks} == {("near-tie", 0.0)}
    assert summary["lossless"]["identical"] == 7 - len(forks)


@pytest.mark.slow
def test_two_ranks_share_the_questions(finished, bench, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run(
        [*torchrun, WORKER, tmp_path, bench],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    shares = [len(lines(tmp_path / f"records-{rank}.jsonl")) for rank in (0, 1)]
    assert shares == [3, 2]
    assert artefacts(tmp_path) == artefacts(finished[0])
