"""The file for Spec-Bench keeps its contract, with every kind of draft, and writes vanilla's text.

The contract is that of `spec_bench_eval.py`, which checks each turn as it comes."""

import importlib
import json
import re
import shutil
import sys

import pytest
import torch
from commands import ROOT, typed
from helpers import adapter_for, saved_adapter, tiny_target

from kangaroo.utils.errors import KangarooError, PromptError

FOLDER = ROOT / "integrations/spec_bench"
QUESTIONS = [
    {"question_id": 82, "category": "writing", "turns": ["Count: one two one two", "Go on"]},
    {"question_id": 81, "category": "qa", "turns": ["Why is the sky blue?"]},
]
# A number as threshold: in a model this small no draft pays, and `auto` would see that.
CHAIN = ["drafter=kangaroo", "drafter.threshold=0"]
CASCADE = ["drafter=cascade", "drafter@drafter.second=kangaroo_tree", "drafter.second.threshold=0"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    here = tmp_path_factory.mktemp("Spec-Bench")
    (here / "evaluation").mkdir()
    shutil.copy(FOLDER / "inference_kangaroo.py", here / "evaluation")
    shutil.copy(ROOT / "tests/evaluation/spec_bench_eval.py", here / "evaluation/eval.py")
    (here / "data/spec_bench").mkdir(parents=True)
    lines = [json.dumps(question) + "\n" for question in QUESTIONS]
    (here / "data/spec_bench/question.jsonl").write_text("".join(lines))
    lm = tiny_target()
    saved_adapter(lm, adapter_for(lm), here / "adapters/tiny")
    return here


@pytest.fixture(scope="module")
def method(checkout):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(checkout)
        yield importlib.import_module("evaluation.inference_kangaroo")


@pytest.fixture
def answers(checkout, method, monkeypatch):
    """Runs the file with these words on the command line; the choices by question."""

    def run(*words):
        monkeypatch.chdir(checkout)
        words = ["--bench-name", "spec_bench", "--max-new-tokens", "24", "model=tiny", *words]
        monkeypatch.setattr(sys, "argv", ["inference_kangaroo.py", "--model-id", "x", *words])
        file = checkout / "data/spec_bench/model_answer/x.jsonl"
        file.unlink(missing_ok=True)
        method.main()
        answered = [json.loads(line) for line in file.read_text().splitlines()]
        return {line["question_id"]: line["choices"] for line in answered}

    return run


@pytest.mark.parametrize("drafter", [CHAIN, CASCADE], ids=lambda words: words[0])
@pytest.mark.parametrize("sampled", [[], ["--temperature", "0.8", "--num-choices", "2"]], ids=len)
def test_texts_are_vanillas_and_every_turn_keeps_the_contract(answers, drafter, sampled):
    vanilla = answers("drafter=vanilla", *sampled)
    answered = answers(*drafter, *sampled)
    assert list(answered) == [81, 82]
    for number, choices in answered.items():
        for choice, plain in zip(choices, vanilla[number], strict=True):
            assert choice["turns"] == plain["turns"]
            assert choice["new_tokens"] == plain["new_tokens"]
            assert plain["accept_lengths"] == [1] * sum(plain["new_tokens"])
            assert plain["decoding_steps"] == plain["new_tokens"]
    lengths = [n for choices in answered.values() for c in choices for n in c["accept_lengths"]]
    assert max(lengths) > 1
    if sampled:
        assert vanilla[81][0]["turns"] != vanilla[81][1]["turns"]


def test_questions_adapters_settings_and_files_are_the_asked_ones(answers, checkout):
    (checkout / "elsewhere").mkdir(exist_ok=True)
    shutil.copytree(checkout / "adapters/tiny", checkout / "elsewhere/mine", dirs_exist_ok=True)
    adapter = [*CHAIN, "drafter.adapter=elsewhere/mine"]
    path = ["--model-path", "random:tiny", "--dtype", "float32"]
    answered = answers(*adapter, *path, "--question-begin", "1", "drafter.steps=1")
    assert list(answered) == [81] and max(answered[81][0]["accept_lengths"]) == 2
    with pytest.raises(KangarooError, match="no adapter at 'nowhere'"):
        answers("drafter=kangaroo", "drafter.adapter=nowhere")


def test_the_answer_of_a_long_prompt_ends_with_the_context(method, monkeypatch):
    engine, tokenizer = method.load_engine(["model=tiny", "drafter=prompt_lookup"])
    monkeypatch.setattr(type(engine.lm), "context", 256)
    long = "a" * (engine.lm.context - 3)
    inputs = tokenizer([long], return_tensors="pt", add_special_tokens=False)
    output_ids, new_token, _, _ = method.kangaroo_forward(inputs, None, None, 24, engine)
    assert new_token <= 3 and output_ids.shape[1] <= engine.lm.context
    inputs = tokenizer([long + "bbb"], return_tensors="pt", add_special_tokens=False)
    with pytest.raises(PromptError, match="context"):
        method.kangaroo_forward(inputs, None, None, 24, engine)

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(engine, "generate", fails)  # nor does an error become an answer
    with pytest.raises(KangarooError, match="decoding failed: no memory is left"):
        method.kangaroo_forward(inputs, None, None, 24, engine)


@pytest.mark.slow
def test_the_lines_of_its_page_run(checkout):
    """`python -m evaluation.inference_kangaroo ...`, from the root of Spec-Bench."""
    page = (FOLDER / "README.md").read_text()
    lines = re.findall(r"^python -m (evaluation\.inference_kangaroo) (.*)$", page, flags=re.M)
    assert len(lines) == 2
    for module, words in lines:
        start = f"import runpy; runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
        (checkout / "as_module.py").write_text(start)  # what `python -m` does
        words = words.replace("vicuna-7b", "tiny").split()
        typed(str(checkout / "as_module.py"), *words, "--max-new-tokens", "8", cwd=checkout)
        assert (checkout / f"data/spec_bench/model_answer/{words[1]}.jsonl").is_file()
