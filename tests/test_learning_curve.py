"""What more text brings: measured as decoding would, and fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import python
from helpers import adapter_for
from test_commands import questions

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.heads import adapter_files
from kangaroo.learning_curve import report
from kangaroo.learning_curve.fit import fit
from kangaroo.learning_curve.measuring import LearningCurveConfig, measure, readers
from kangaroo.models.loading import TINY, Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError, CorruptFile

NEW_TOKENS, STEPS = 12, 6


def target() -> LM:
    return LM(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])


def saved(lm: LM, folder: Path, tokens: int, epochs: int = 2, scale: float = 1.0) -> None:
    """An adapter that says it has read so many different tokens."""
    adapter = adapter_for(lm)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.mul_(scale)
    training = {"trainer": {"epochs": epochs}, "progress": {"assistant_tokens": tokens * epochs}}
    about = adapter_files.describe(lm, adapter, training)
    adapter_files.save(adapter, about, torch.tensor([3]), folder)


@pytest.fixture
def runs(tmp_path):
    lm = target()
    for tokens, scale in ((100, 1.0), (1000, 0.5)):
        saved(lm, tmp_path / f"runs/tokens={tokens}/attention-exit2", tokens, scale=scale)
    asked = questions()
    asked[0]["category"] = "math_reasoning"
    asked[1]["turns"].append("And twice that?")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)) + "\n")
    return tmp_path / "runs"


def config_of(runs: Path, **changes) -> LearningCurveConfig:
    bench = BenchConfig(path=str(runs.parent / "questions.jsonl"))
    settings = {"max_new_tokens": NEW_TOKENS, "steps": STEPS} | changes
    return LearningCurveConfig(str(runs), str(runs / "measured"), bench, **settings)


def test_results_are_those_of_decoding(runs):
    lm, tokenizer = target(), byte_tokenizer()
    results = measure(lm, tokenizer, readers(runs), config_of(runs), {"name": "tiny"})
    assert [(one.reader.curve, one.reader.tokens, one.reader.epochs) for one in results] == [
        ("attention-exit2", 100, 2),
        ("attention-exit2", 1000, 2),
    ]
    for one in results:
        drafter = KangarooConfig(adapter=str(one.reader.folder), steps=STEPS, threshold=0)
        engine, rounds = Engine(lm, drafter.build(lm)), []
        right = positions = 0
        for question in json_lines(runs.parent / "questions.jsonl"):
            messages: list[Message] = []
            for text in question["turns"]:
                messages.append(Message(role="user", content=text))
                prompt = prompt_ids(tokenizer, messages)
                (said,) = engine.generate([prompt], NEW_TOKENS)
                rounds += said.steps
                # a draft of one token, begun at every position
                single = KangarooConfig(adapter=str(one.reader.folder), steps=1, threshold=0)
                for at in range(1, len(said.tokens)):
                    start = [*prompt, *said.tokens[: at - 1]]
                    (part,) = Engine(lm, single.build(lm)).generate([start], 3)
                    right += part.steps[1].accepted
                    positions += 1
                answer = tokenizer.decode(said.tokens, skip_special_tokens=True).strip()
                messages.append(Message(role="assistant", content=answer))
        accepted, written = sum(r.accepted > 0 for r in rounds), sum(len(r.tokens) for r in rounds)
        assert one.values["ctar1"] == pytest.approx(accepted / len(rounds))
        assert one.values["compression_rate"] == pytest.approx(written / len(rounds))
        assert one.values["agreement"] == pytest.approx(right / positions)
        assert set(one.tasks) == {"math_reasoning", "qa"}


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_that_goes_on_measures_the_same_and_other_adapters_are_refused(runs):
    lm, config = target(), config_of(runs)
    found = readers(runs)
    first = measure(lm, byte_tokenizer(), found, config, {"name": "tiny"})
    files = sorted((runs / "measured/trace").glob("*.safetensors"))
    files[0].unlink()
    assert measure(lm, byte_tokenizer(), found, config, {"name": "tiny"}) == first
    with pytest.raises(ConfigError, match="holds a trace of other settings"):
        measure(lm, byte_tokenizer(), found[:1], config, {"name": "tiny"})


def test_what_cannot_be_a_curve_is_named(runs, tmp_path):
    with pytest.raises(ConfigError, match="has no adapter in it; train some first"):
        readers(tmp_path / "nothing")
    saved(target(), runs / "again/attention-exit2", 1000)
    with pytest.raises(ConfigError, match="have read the same number of tokens"):
        readers(runs)
    config = runs / "again/attention-exit2" / adapter_files.CONFIG
    told = json.loads(config.read_text())
    del told["training"]["trainer"]
    config.write_text(json.dumps(told))
    with pytest.raises(CorruptFile, match="does not say 'trainer': how much"):
        readers(runs)


def test_a_law_is_found_and_foretells():
    tokens = [250_000, 500_000, 1_000_000, 2_000_000, 4_000_000]
    values = [0.6 - 0.2 * (n / 1e6) ** -0.3 for n in tokens]
    law = fit(tokens, values)
    assert law is not None and law.error < 1e-3
    assert law.at(40e6) == pytest.approx(0.6 - 0.2 * 40**-0.3, abs=0.005)
    assert law.power == pytest.approx(0.3, abs=0.02)
    assert fit(tokens[:3], values[:3]) is None  # any three points lie on one
    straight = fit(tokens, [0.5, 0.6, 0.7, 0.8, 0.9])  # nothing can be right more than always
    assert straight is not None and straight.ceiling <= 1


def test_the_command_writes_table_plot_and_numbers(runs):
    for tokens in (10, 10_000):
        saved(target(), runs / f"tokens={tokens}/attention-exit2", tokens)
    options = "model=tiny runs=runs output=out bench.path=questions.jsonl max_new_tokens=8"
    done = python("scripts/learning_curve.py", *options.split(), cwd=runs.parent)
    assert done.returncode == 0, done.stderr
    assert "CTAR(1) by task" in done.stdout
    told = json.loads((runs.parent / "out/learning_curve.json").read_text())
    assert [one["reader"]["tokens"] for one in told["results"]] == [10, 100, 1000, 10_000]
    assert told["laws"]["attention-exit2"]["agreement"]["ceiling"] <= 1
    page = (runs.parent / "out/learning_curve.md").read_text()
    assert page.count("| attention-exit2 |") == 8 and "CTAR(1) by task" in page
    assert "10 times the most text would bring" in page
    assert (runs.parent / "out/learning_curve.png").stat().st_size > 10_000


def test_curves_without_a_law_are_joined(runs):
    results = measure(target(), byte_tokenizer(), readers(runs), config_of(runs), {"name": "tiny"})
    laws = report.laws_of(results)
    assert laws == {"attention-exit2": {"agreement": None, "ctar1": None}}
    assert "would bring" not in report.markdown(results, laws, 10)
    axes = report.draw(results, laws, 10, "tiny").axes[0]
    assert axes.containers[0].lines[0].get_linestyle() == "-"
