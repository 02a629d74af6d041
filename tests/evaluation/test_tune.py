"""Tuning: which questions choose, which settings go on, and that evaluate takes what is written."""

import json

import pytest
from commands import typed, write_inputs
from composing import of_command
from helpers import adapter_for, saved_adapter, tiny_target
from omegaconf import OmegaConf

import kangaroo
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.tune import TuneConfig, split, write_settings

CHAIN = kangaroo.KangarooConfig(adapter="adapters/a", steps=3, threshold=0.4, vocabulary=1024)
DRAFTERS = [
    CHAIN,
    kangaroo.HybridConfig(adapter="adapters/a", steps=8, min_gain_per_step=1.25, nodes=7),
    kangaroo.PromptLookupConfig(num_pred_tokens=8),
    kangaroo.KangarooTreeConfig(adapter="adapters/a", steps=4, threshold=0.2, top_k=3, nodes=16),
    kangaroo.CascadeConfig(first=kangaroo.PromptLookupConfig(num_pred_tokens=3), second=CHAIN),
]
COMMAND = """
    scripts/tune.py model=tiny bench.path=questions.jsonl tuning_questions=3 reporting_questions=2
    max_new_tokens=8 search.kangaroo.threshold=[0.0,0.6] search.kangaroo.steps=[2]
    search.hybrid.min_gain_per_step=[1.5] search.hybrid.nodes=[5] ~drafter@more.prompt_lookup
    +drafter@more.deep=kangaroo more.deep.adapter=adapters/tiny-deep
"""
USE = """
    evaluate.py --config-dir=outputs/tune/tiny drafter=tuned model=tiny bench.path=questions.jsonl
    question_end=1 max_new_tokens=6 warmup=0 baselines=[vanilla] output=used
"""


def test_no_question_is_for_tuning_and_for_reporting():
    tuning, reporting = split(load_questions(BenchConfig()), TuneConfig("out"))
    both = {q.question_id for q in tuning} | {q.question_id for q in reporting}
    assert (len(tuning), len(reporting), len(both)) == (12, 24, 36)
    for part in (tuning, reporting):
        assert len({question.task for question in part}) == 6
    bench = [Question(i, "qa", ["?"]) for i in range(5)]
    with pytest.raises(kangaroo.ConfigError, match="no more than the 5 questions"):
        split(bench, TuneConfig("out", tuning_questions=3, reporting_questions=3))


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
def test_evaluate_takes_the_settings_of_the_best(drafter, tmp_path):
    write_settings(drafter, tmp_path, "python evaluate.py")
    options = ["drafter=tuned", "output=out", f"hydra.searchpath=[file://{tmp_path}]"]
    assert OmegaConf.to_object(of_command("evaluate", options)).drafter == drafter


def test_the_command_tunes_and_evaluate_takes_what_it_wrote(tmp_path):
    lm = tiny_target()
    for name, exit_layer in (("tiny", 2), ("tiny-deep", 3)):
        saved_adapter(lm, adapter_for(lm, exit_layer), tmp_path / "adapters" / name, None)
    write_inputs(tmp_path)
    typed(*COMMAND.split(), cwd=tmp_path)
    output = tmp_path / "outputs/tune/tiny"
    numbers = json.loads((output / "tune.json").read_text())
    assert not set(numbers["tuning"]) & set(numbers["reporting"])
    tried, best = [each["name"] for each in numbers["tried"]], numbers["best"]
    chains = {f"kangaroo,threshold={x},steps=2" for x in (0.0, 0.6)}
    others = {"today", "hybrid,min_gain_per_step=1.5,nodes=5", "deep"}
    assert set(tried) == chains | others and best == tried[0]
    report = json.loads((output / "report" / best / "comparison.json").read_text())
    assert {method["name"] for method in report["methods"]} == {"today", best, "vanilla"}
    assert (output / "report" / best / "speedup.png").stat().st_size > 5000  # evaluate's own
    records = {file: file.read_bytes() for file in output.rglob("records-0.jsonl")}
    assert len(records) >= len(tried) + 1
    (output / "tune.json").unlink()
    typed(*COMMAND.split(), cwd=tmp_path)  # goes on, decoding nothing
    assert json.loads((output / "tune.json").read_text())["tried"] == numbers["tried"]
    assert all(file.read_bytes() == before for file, before in records.items())
    typed(*USE.split(), cwd=tmp_path)
    assert (tmp_path / "used/summary.json").is_file()
