"""`import kangaroo`: three lines write what the engine writes, and errors name what was wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from helpers import adapter_for
from omegaconf import OmegaConf
from test_cli import MODELS, ROOT, composed
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import kangaroo
from kangaroo.api import load_target, model_config
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import VanillaConfig
from kangaroo.engine import Engine
from kangaroo.errors import AdapterNotFound, ConfigError, KangarooError, ModelNotFound, PromptError
from kangaroo.generation import Token
from kangaroo.models import ModelConfig
from kangaroo.prompts import prompt_ids
from kangaroo.sampling import Sampling
from kangaroo.streaming import pieces
from kangaroo.trained import adapter_files

ADAPTER = "untrained:2"
QUESTIONS = ["Why is the sky blue?", "And at night?", "Why?"]
SAMPLED = {"temperature": 0.8, "top_k": 20, "seed": 3}


@pytest.fixture(scope="module")
def model():
    return kangaroo.load("tiny", adapter=ADAPTER)


@pytest.fixture(scope="module")
def engine():
    """What the three lines stand for."""
    lm, _ = load_target(model_config("tiny"))
    return Engine(lm, KangarooConfig(adapter=ADAPTER).build(lm))


def asked(question):
    return [{"role": "user", "content": question}]


def engines_texts(engine, tokenizer, questions, sampling):
    prompts = [prompt_ids(tokenizer, asked(question)) for question in questions]
    done = engine.generate(prompts, 24, sampling)
    return [tokenizer.decode(d.tokens, skip_special_tokens=True) for d in done]


def test_the_package_alone_loads_no_torch():
    code = "import sys, kangaroo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = kangaroo.lode


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_engines(model, engine, sampling):
    expected = engines_texts(engine, model.tokenizer, QUESTIONS[:1], Sampling(**sampling))
    assert [model.generate(QUESTIONS[0], max_new_tokens=24, **sampling)] == expected


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_a_list_of_prompts_gives_a_list_of_the_engines_texts(model, engine, batch_size):
    expected = engines_texts(engine, model.tokenizer, QUESTIONS, Sampling(**SAMPLED))
    prompts = [QUESTIONS[0], asked(QUESTIONS[1]), QUESTIONS[2]]
    assert model.generate(prompts, 24, batch_size=batch_size, **SAMPLED) == expected
    assert model.generate([]) == []


def test_a_conversation_is_one_prompt(model):
    assert model.generate(asked("Why?"), 24) == model.generate("Why?", 24)
    talk = [*asked("Why?"), {"role": "assistant", "content": "So."}, *asked("Why?")]
    assert model.generate(talk, 24) != model.generate("Why?", 24)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_pieces_join_to_the_text(model, sampling):
    streamed = list(model.stream("Why?", max_new_tokens=48, **sampling))
    assert "".join(streamed) == model.generate("Why?", max_new_tokens=48, **sampling)
    assert len(streamed) > 10


def test_the_parts_by_hand_on_the_architecture_page_write_the_same(model, capsys):
    page = (ROOT / "docs/architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    code = code.replace("adapters/smollm2-135m", ADAPTER).replace("smollm2-135m", "tiny")
    exec(compile(code, "architecture.md", "exec"), {})
    expected = model.generate("Why is the sky blue?", 128, temperature=0.8, seed=1)
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_stop_string_ends_both(model):
    whole = model.generate("Why?", 48)
    stop = whole[10]
    text = model.generate("Why?", 48, stop=[stop])
    assert text == whole[: whole.index(stop) + 1] == "".join(model.stream("Why?", 48, stop=[stop]))


def test_a_piece_keeps_the_space_that_a_tokenizer_strips_at_the_start_of_a_text():
    """As SentencePiece tokenizers do, Vicuna's and Llama 2's; special tokens leave no trace."""
    words = {"<s>": 0, "▁Why": 1, "▁is": 2, "▁it": 3, "?": 4, "▁": 5}
    inner = Tokenizer(WordLevel(words, unk_token="<s>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    ids = [5, 1, 0, 2, 5, 3, 4, 0]
    shown = [text for text, _ in pieces((Token(i, False) for i in ids), tokenizer)]
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=True) == " Why is  it?"
    assert len(shown) == 5


@pytest.mark.parametrize("name", MODELS)
def test_a_name_stands_for_what_the_command_line_takes_it_for(name):
    config = OmegaConf.to_object(composed("train", f"model={name}").model)
    assert model_config(name) == config == model_config(config.path)


@pytest.mark.parametrize(
    "path, name",
    [("someone/Some-7B", "Some-7B"), ("random:small:someone/Some-7B", "Some-7B")],
)
def test_another_hub_id_stands_for_itself(path, name):
    assert model_config(path) == ModelConfig(name=name, path=path)


def test_a_folder_stands_for_itself(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_config("mine") == ModelConfig(name="mine", path="mine")


def test_the_models_own_adapter_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFound, match="no adapter at 'adapters/tiny'"):
        kangaroo.load("tiny")
    lm, _ = load_target(model_config("tiny"))
    adapter = adapter_for(lm)
    about, folder = adapter_files.describe(lm, adapter, {}), "outputs/train/tiny/attention-exit2"
    adapter_files.save(adapter, about, torch.tensor([3]), tmp_path / folder)
    drafter = kangaroo.load("tiny", steps=3, threshold=0.2).engine.drafter
    assert (drafter.exit_layer, drafter.steps, drafter.threshold) == (2, 3, 0.2)


def test_a_missing_adapter_is_told_before_the_model_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFound, match="adapters/vicuna-7b"):
        kangaroo.load("vicuna-7b")


def test_another_drafter_writes_the_same(model):
    vanilla = kangaroo.load("tiny", drafter=VanillaConfig())
    assert vanilla.generate(QUESTIONS, 24) == model.generate(QUESTIONS, 24)


REFUSED = {
    "an unknown name": ("smollm", {}, ConfigError, "no model 'smollm'.*smollm2-135m, tiny"),
    "no such folder": ("./none", {"adapter": ADAPTER}, ModelNotFound, "no folder './none'"),
    "an unknown setting": ("tiny", {"treshold": 0.5}, ConfigError, "'treshold'.*threshold"),
    "a value that cannot be": (
        "tiny",
        {"adapter": ADAPTER, "threshold": 2},
        ConfigError,
        "threshold=2 must be a number, 0 or more and below 1",
    ),
    "a drafter and settings": (
        "tiny",
        {"drafter": VanillaConfig(), "adapter": "x", "steps": 2},
        ConfigError,
        "adapter, steps given beside drafter=",
    ),
    "a drafter's name": (
        "tiny",
        {"drafter": "hybrid"},
        ConfigError,
        "drafter='hybrid' is no.*pass",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_loading_refuses(case):
    name, settings, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        kangaroo.load(name, **settings)


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ("", {}, "the prompt is empty"),
        (["Why?", " "], {}, "the prompt is empty"),
        ([{"role": "user"}], {}, "{'role': 'user'} is no message"),
        ([*asked("Why?"), "And?"], {}, "'And\\?' is no message"),
        ("Why?", {"max_new_tokens": 0}, "max_new_tokens must be 1 or more"),
        ("Why?", {"temprature": 1}, "'temprature'; Sampling has temperature"),
        ("Why?", {"temperature": -1}, "temperature=-1 must be a number, 0 or more"),
    ],
)
def test_generating_refuses(model, prompt, settings, message):
    with pytest.raises(KangarooError, match=message):
        model.generate(prompt, **settings)


def test_streaming_refuses_at_once(model):
    with pytest.raises(PromptError, match="'Why' is no message"):
        model.stream(["Why"])
    with pytest.raises(ConfigError, match="'temprature'"):
        model.stream("Why?", temprature=1)
