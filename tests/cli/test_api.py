"""`import kangaroo`: three lines write what the engine writes, and errors name what was wrong."""

import random
import re

import numpy as np
import pytest
from commands import ROOT
from composing import DRAFTERS, MODELS, composed
from helpers import adapter_for, saved_adapter
from omegaconf import OmegaConf

import kangaroo
from kangaroo.api import drafter_config, load_target, load_target_for, model_config
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import VanillaConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.engine.streaming import UntilStop
from kangaroo.models.loading import ModelConfig
from kangaroo.models.prompts import prompt_ids
from kangaroo.utils import errors
from kangaroo.utils.errors import AdapterNotFound, ConfigError, PromptError

ADAPTER = "untrained:2"
QUESTIONS = ["Why is the sky blue?", "And at night?", "Why?"]
SAMPLED = {"temperature": 0.8, "top_k": 20, "seed": 3}
MINE, NOBODYS = (ModelConfig(name, name) for name in ("mine", "nobodys"))
LOOKUP = {"drafter": "prompt_lookup", "max_matching_ngram_size": 2}
CASCADE = {"drafter": "cascade", "first": VanillaConfig(), "second": "lookahead"}
REFUSED = [
    ("smollm", {}, "no model 'smollm'.*smollm2-135m, tiny"),
    (None, {"drafter": "vanilla"}, "model=None must be a name, a folder, a hub id or a Model"),
    ("tiny", {"treshold": 0.5}, "'treshold'.*threshold"),
    ("tiny", {"adapter": 3}, "adapter=3 is a int; it takes str \\| None"),
    ("tiny", {"drafter": VanillaConfig(), "adapter": "x", "steps": 2}, "adapter, steps: set this"),
    ("tiny", {"drafter": KangarooConfig()}, "KangarooConfig needs adapter=.*drafter='kangaroo' t"),
    ("tiny", {"adapter": ADAPTER, "threshold": "Auto"}, "threshold='Auto' must be .*, or auto"),
    ("tiny", {"drafter": "hybird"}, "no drafter 'hybird'. Pass one of: block, cascade, .*hybrid"),
]


@pytest.fixture(scope="module")
def model():
    return kangaroo.load("tiny", adapter=ADAPTER)


def talk(question):
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("sampling, batch_size", [({}, None), (SAMPLED, 1), (SAMPLED, 2)])
def test_texts_are_the_engines_in_a_list_alone_and_in_pieces(model, sampling, batch_size):
    lm, _ = load_target(model_config("tiny"))  # what the three lines stand for
    engine = Engine(lm, KangarooConfig(adapter=ADAPTER).build(lm))
    prompts = [prompt_ids(model.tokenizer, talk(question)) for question in QUESTIONS]
    done = engine.generate(prompts, 24, Sampling(**sampling))
    expected = [model.tokenizer.decode(d.tokens, skip_special_tokens=True) for d in done]
    questions = [QUESTIONS[0], talk(QUESTIONS[1]), QUESTIONS[2]]
    assert model.generate(questions, 24, batch_size=batch_size, **sampling) == expected
    assert model.generate(QUESTIONS[0], max_new_tokens=24, **sampling) == expected[0]
    streamed = list(model.stream(QUESTIONS[0], max_new_tokens=24, **sampling))
    assert "".join(streamed) == expected[0] and len(streamed) > 10
    assert model.generate([]) == []


def test_a_conversation_is_one_prompt(model):
    expected = model.generate("Why?", 24)
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    for prompt in (
        talk("Why?"),
        talk("Why?")[0],  # a single message
        tuple(talk("Why?")),
        (message for message in talk("Why?")),
        [{"role": "user", "content": parts}],
    ):
        assert model.generate(prompt, 24) == expected
    assert model.generate([talk("Why?"), "Why?"], 24) == [expected] * 2
    turns = [*talk("Why?"), {"role": "assistant", "content": "So."}, *talk("Why?")]
    assert model.generate(turns, 24) != expected


def test_the_parts_by_hand_on_the_architecture_page_write_the_same(model, capsys):
    page = (ROOT / "docs/architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    code = code.replace("adapters/smollm2-135m-fused", ADAPTER).replace("smollm2-135m", "tiny")
    exec(compile(code, "architecture.md", "exec"), {})
    expected = model.generate("Why is the sky blue?", 128, temperature=0.8, seed=1)
    assert capsys.readouterr().out == f"{expected}\n"


def test_an_answer_ends_before_a_stop_string_which_is_no_list_of_its_letters(model):
    whole = model.generate("Why?", 48)
    letter, absent = whole[10], whole[10] + "\N{KANGAROO}"
    ended = whole[: whole.index(letter)]
    stops = {whole: (absent, [absent], (absent,), None, []), ended: (letter, {letter, absent})}
    for expected, forms in stops.items():
        for stop in forms:
            assert model.generate("Why?", 48, stop=stop) == expected
            assert "".join(model.stream("Why?", 48, stop=stop)) == expected
    assert model.generate(["Why?"] * 2, 48, stop=iter([letter])) == [ended] * 2


def test_no_seed_is_a_random_one(model, monkeypatch):
    monkeypatch.setattr("kangaroo.api.secrets.randbits", lambda bits: 7)
    expected = model.generate(["Why?"] * 2, 24, temperature=1.5, seed=7)
    assert model.generate(["Why?"] * 2, 24, temperature=1.5, seed=None) == expected
    assert "".join(model.stream("Why?", 24, temperature=1.5, seed=None)) == expected[0]


def test_no_limit_is_the_room_of_the_context(model, monkeypatch):
    monkeypatch.setattr(type(model.engine.lm), "context", 64)
    room = 64 - len(prompt_ids(model.tokenizer, talk("Why?")))
    assert 0 < room < 60
    expected = model.generate("Why?", room)
    assert model.generate("Why?", None) == "".join(model.stream("Why?", None)) == expected
    with pytest.raises(PromptError, match="Shorten the prompt by"):
        model.generate("Why?" * 20, None)


@pytest.mark.parametrize("rule", [Rule.match, Rule.rejection])
def test_numbers_of_numpy_are_numbers_and_a_rule_goes_by_its_name(rule):
    chain = kangaroo.load("tiny", drafter="kangaroo", adapter=ADAPTER, steps=2)
    expected = chain.generate("Why?", 24, temperature=1.5, top_k=50, seed=3, rule=rule)
    numbers = {"temperature": np.float64(1.5), "top_k": np.int64(50), "seed": np.int32(3)}
    assert chain.generate("Why?", np.int64(24), **numbers, rule=rule.name) == expected


@pytest.mark.parametrize("stop", [[], ["ab"], ["aab", "ba"], ["aa", "aaa"], ["abab"]])
def test_text_ends_before_the_first_stop_string_however_it_comes(stop):
    rng = random.Random(2)
    for _ in range(300):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(12)))
        places = [at for at in map(text.find, stop) if at >= 0]
        until, shown, at = UntilStop(stop), "", 0
        while at < len(text) and not until.stopped:
            size = rng.randrange(1, 4)
            shown += until.push(text[at : at + size])
            at += size
        assert until.stopped == bool(places)
        whole = shown + until.end()
        # pushed piece by piece, a stop that is complete earlier may win over one that begins before
        assert whole == text[: min(places)] if places and len(stop) < 2 else text.startswith(whole)


def test_a_name_stands_for_what_the_command_line_takes_it_for(tmp_path, monkeypatch):
    for name in MODELS:
        config = OmegaConf.to_object(composed("serve", f"model={name}").model)
        assert model_config(name) == config == model_config(config.path)
    (tmp_path / "Some-7B").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("someone/Some-7B", "random:small:someone/Some-7B", "Some-7B"):
        assert model_config(path) == ModelConfig(name="Some-7B", path=path)


def test_the_models_adapter_is_the_default_and_looked_for_before_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "vicuna-7b"):
        with pytest.raises(AdapterNotFound, match=f"no adapter at 'adapters/{name}'"):
            kangaroo.load(name, drafter="kangaroo")
    lm, _ = load_target(model_config("tiny"))
    saved_adapter(lm, adapter_for(lm), tmp_path / "outputs/train/tiny/attention-exit2")
    drafter = kangaroo.load("tiny", steps=3, threshold=0.2).engine.drafter
    assert (drafter.exit_layer, drafter.steps, drafter.threshold) == (2, 3, 0.2)


@pytest.mark.parametrize("settings", [{"drafter": VanillaConfig()}, LOOKUP, CASCADE], ids=str)
def test_another_drafter_writes_the_same(model, settings):
    other = kangaroo.load("tiny", **settings)
    assert other.generate(QUESTIONS, 24) == model.generate(QUESTIONS, 24)


def test_a_drafters_name_stands_for_what_the_command_line_takes_it_for():
    more = (f"+drafter@more.{name}={name}" for name in DRAFTERS)
    command = OmegaConf.to_object(composed("evaluate", "model=vicuna-7b", *more).more)
    vicuna = model_config("vicuna-7b")
    assert command == {name: drafter_config(name, vicuna, {}) for name in DRAFTERS}


def test_a_folder_without_an_adapter_is_told_which_drafters_need_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(AdapterNotFound) as missing:
        kangaroo.load("mine", drafter="kangaroo")
    drafters = re.findall(r"\w+", str(missing.value).rpartition("Drafters that are ready: ")[2])
    assert {"hybrid", "prompt_lookup", "suffix", "token_recycling", "vanilla"} < set(drafters)
    for drafter in set(DRAFTERS) - set(drafters):
        with pytest.raises(errors.KangarooError, match="mine"):
            drafter_config(drafter, MINE, {}).settings()
    for drafter in drafters:
        with pytest.raises(errors.UnsupportedModel, match="/mine' cannot be a target"):
            kangaroo.load(tmp_path / "mine", drafter=drafter)  # which is asked for
        assert kangaroo.load("tiny", drafter=drafter).generate("Why?", 8)


def test_a_hybrid_without_an_adapter_drafts_from_the_text_and_says_so_once(
    model, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    config = drafter_config("hybrid", NOBODYS, {})
    texts = [kangaroo.load("tiny", drafter=config).generate(QUESTIONS, 40) for _ in range(2)]
    assert texts == [model.generate(QUESTIONS, 40)] * 2
    assert config.settings()["adapter"] == "adapters/nobodys-fused" and not config.made_by()
    (said,) = (x for x in caplog.messages if "drafts from the text alone" in x)
    assert "no adapter at 'adapters/nobodys'" in said and "train.py model=FOLDER" in said
    none = drafter_config("hybrid", NOBODYS, {"adapter": None})  # asked for, so nothing is said
    assert kangaroo.load("tiny", drafter=none).generate(QUESTIONS, 40) == texts[0]
    assert sum("from the text alone" in x for x in caplog.messages) == 1
    engine = kangaroo.load("tiny", drafter=config).engine
    (done,) = engine.generate([prompt_ids(model.tokenizer, talk("ab " * 60))], 40)
    assert sum(step.drafted for step in done.steps) > 0
    # what is missing though it was asked for is an error
    with pytest.raises(AdapterNotFound, match="'outputs/mine'"):
        kangaroo.load("tiny", adapter="outputs/mine")


def test_a_missing_adapter_names_its_method_and_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafters = {"ours": drafter_config("cascade", MINE, {})}
    drafters["theirs"] = drafter_config("suffix", MINE, {})
    said = r"more.ours.second: no adapter.* pass more.ours.second.adapter= .*Drafters that are"
    with pytest.raises(AdapterNotFound, match=said):
        load_target_for(model_config("tiny"), VanillaConfig(), more=drafters)
    with pytest.raises(AdapterNotFound, match=r"^drafter.second: .* drafter.second.adapter="):
        load_target_for(model_config("tiny"), drafters["ours"])


@pytest.mark.parametrize("drafter", ["kangaroo", "hybrid", "medusa"])
def test_a_training_runs_folder_is_told_what_it_holds(drafter, tmp_path):
    lm, _ = load_target(model_config("tiny"))
    saved_adapter(lm, adapter_for(lm), tmp_path / "attention-exit3")
    message = f"it holds {tmp_path}/attention-exit3: pass drafter.adapter= one"
    with pytest.raises(AdapterNotFound, match=re.escape(message)):
        kangaroo.load("tiny", adapter=str(tmp_path), drafter=drafter)


def test_a_chat_template_can_be_chosen():
    usual = kangaroo.load("tiny", drafter="vanilla")
    other = kangaroo.load("tiny", drafter="vanilla", chat_template="vicuna")
    assert "USER:" in other.tokenizer.chat_template
    assert usual.generate("Why?", 24) != other.generate("Why?", 24)


@pytest.mark.parametrize("name, settings, message", REFUSED)
def test_loading_refuses(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        kangaroo.load(name, **settings)


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        (["Why?", " "], {}, "the prompt is empty"),
        ([{"role": "user"}], {}, "{'role': 'user'} is no message"),
        ("Why?", {"temprature": 1}, "'temprature'; Sampling has temperature"),
        (None, {}, "None is no prompt"),
        ([{"role": "user", "content": None}], {}, "message of 'user' is no text.*null"),
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "has a part.*image_url"),
        ("Why \udcff?", {}, r"no text: .*half of a surrogate pair.*\\udcff"),
        ("Why?", {"stop": ""}, "stop='': '' must be a text"),
        ("Why?", {"temperature": True}, "temperature=True must be a number"),
        ("Why?", {"rule": "Match"}, "sampling.rule=Match must be one of match, rejection"),
        ([], {"batch_size": 0}, "batch_size=0 must be a whole number, 1 or more"),
    ],
)
def test_generating_refuses_and_streaming_does_so_at_once(model, prompt, settings, message):
    with pytest.raises(errors.KangarooError, match=message):
        model.generate(prompt, **settings)
    if "batch_size" not in settings and (not isinstance(prompt, list) or prompt[:1] == talk("")):
        with pytest.raises(errors.KangarooError, match=message):
            model.stream(prompt, **settings)
