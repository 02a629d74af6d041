"""The speed benchmark: what is counted and how, never how fast this machine is. And transformers'
`generate` as a baseline: the same decoder whatever the model asks for."""

import itertools
import json
from importlib.metadata import version

import helpers
import pytest
from helpers import adapter_for, chain_of, random_prompts, tiny, tiny_model, vanilla_texts
from rich.console import Console
from transformers import GenerationConfig

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import Vanilla, VanillaConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.engine.session import Session
from kangaroo.evaluation import speed
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.speed import bytes_read, throughput
from kangaroo.models.attention import ATTENTION
from kangaroo.models.loading import ModelConfig, byte_tokenizer, load_target
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import TargetModel
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError

# The tiny target in float32: width 32, 4 query and 2 key/value heads of 8, feed-forward 64. A layer
# has q and o, k and v, gate, up and down, and two norms.
LAYERS = 6
LAYER = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
NORM = 4 * 32
HEAD = 4 * 64 * 32
ROW = 4 * 32
KV = 4 * 2 * 2 * 8  # of one token in one layer
EXTREMES = (-1, 0, 1, 10**9, 1e-9, True, "a", ["a"], [3], [[3]], [[3, -1.0]], {"a": 1})
FIELDS = sorted(vars(GenerationConfig()).keys() - {"eos_token_id"})  # it ends texts, for all alike


def text(seconds=1.0, rounds=((1, 0),) * 4, tokens=None):
    """Of a prefill of half a second, and rounds of (tokens, drafted) that take so long together."""
    steps = [StepRecord([0], 0, 0, 0.0, 0.0)]
    for count, drafted in rounds:
        steps.append(StepRecord([0] * count, 0, drafted, host_seconds=seconds / len(rounds)))
    return Generation(tokens or [0] * 9, steps, "length", prefill_seconds=0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vanilla_token_reads_every_layer_the_head_once_and_the_occupied_kv(tied):
    lm = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    assert (lm.head.weight is lm.hf.model.embed_tokens.weight) == tied
    assert bytes_read(lm, length=10) == ROW + LAYERS * (LAYER + 10 * KV) + NORM + HEAD


def test_all_methods_write_the_same_text_past_eos(monkeypatch):
    lm = tiny()
    prompt = random_prompts(12)[0]
    written = vanilla_texts(lm, [prompt], 10)[0][len(prompt) :]
    lm.hf.generation_config.eos_token_id = written[3]
    by_transformers = generate(lm, prompt, 10)
    assert lm.hf.config._attn_implementation == ATTENTION
    assert [len(step.tokens) for step in by_transformers.steps] == [1] * 10
    assert by_transformers.prefill_seconds > 0 and by_transformers.steps[0].seconds == 0
    drafter = chain_of(lm, adapter_for(lm), steps=3, threshold=0)
    ours = [speed.write_by_engine(Engine(lm, each), prompt, 10) for each in (Vanilla(), drafter)]
    assert [each.tokens for each in (by_transformers, *ours)] == [written] * 3
    monkeypatch.setattr(lm.hf, "generate", None)
    with pytest.raises(TypeError, match="not callable"):
        generate(lm, prompt, 10)
    assert lm.hf.config._attn_implementation == ATTENTION  # also where it fails


def test_methods_take_turns_and_each_is_first_equally_often():
    order = []

    def method(name):
        return lambda prompt, new_tokens: order.append((name, prompt[0])) or text(tokens=prompt)

    texts = speed.take_turns({name: method(name) for name in "abc"}, [[7], [8], [9]], 5, 3, "test")
    for of_prompts in texts.values():
        assert [[t.tokens for t in each] for each in of_prompts] == [[[i]] * 3 for i in (7, 8, 9)]
    for prompt in (7, 8, 9):
        assert sorted(name for name, token in order[::3] if token == prompt) == ["a", "b", "c"]


def test_the_results_of_a_method_belong_together():
    figures = {"ms_per_token": 500, "of_limit": 0.25, "first_ms": 500}
    result = speed.summarise([text(2.0, [(3, 4), (1, 2)])], limit=0.125)
    assert result == pytest.approx(figures)


def test_prompts_are_spread_over_a_benchs_questions_that_fit_or_have_a_length():
    tokenizer = byte_tokenizer()
    every = speed.question_prompts(tokenizer, 66, BenchConfig(), longest=5000)
    assert speed.question_prompts(tokenizer, 6, BenchConfig(), longest=5000) == every[5::11]
    longest = sorted(map(len, every))[-3]
    assert max(map(len, speed.question_prompts(tokenizer, 66, BenchConfig(), longest))) == longest
    with pytest.raises(ConfigError, match=r"no question of demo.*10 tokens"):
        speed.question_prompts(tokenizer, 6, BenchConfig(), longest=10)
    question = prompt_ids(tokenizer, [Message(role="user", content="...")])
    for length in (16, 256, 20_000):
        ids = speed.long_prompt(tokenizer, length)
        assert len(ids) == length and ids[-6:] == question[-6:]  # the chat template's end


def test_a_batch_whose_cache_has_no_room_is_left_out(monkeypatch, caplog):
    lm = tiny(num_hidden_layers=LAYERS)
    of_row = LAYERS * KV * (12 + 8)
    monkeypatch.setattr(memory, "free", lambda device: 3 * of_row)
    engines = {"vanilla": Engine(lm, Vanilla()), "mine": Engine(lm, chain_of(lm, adapter_for(lm)))}
    rows = throughput(engines, random_prompts(12, 9), 8, [1, 2], repeats=3)
    assert [row["batch"] for row in rows] == [1]
    assert 0 < rows[0]["lowest"] <= rows[0]["speedup"] <= rows[0]["highest"]
    assert f"batch 2 is left out: its caches would take {4 * of_row} bytes" in caplog.text


def test_engines_take_turns_step_by_step_until_each_has_a_whole_text(monkeypatch):
    lm = tiny()
    prompts = random_prompts(12, 9)
    engines = [
        Engine(lm, each) for each in (Vanilla(), helpers.oracle(vanilla_texts(lm, prompts, 9)))
    ]
    turns, step, clock = [], Session.step, itertools.count()
    monkeypatch.setattr(Session, "step", lambda self: turns.append(self.engine) or step(self))
    monkeypatch.setattr(speed, "now", lambda device: next(clock))
    rates = speed.tokens_per_second(engines, prompts, 9)
    vanilla, oracle = ([i for i, engine in enumerate(turns) if engine is x] for x in engines)
    assert [i // 2 for i in vanilla[: len(oracle)]] == [i // 2 for i in oracle]
    assert turns[0] is turns[3] is engines[1] and len(vanilla) == 8 > len(oracle)
    assert rates[0] == 2 and rates[1] > 3  # every step takes a second


def test_the_whole_benchmark_on_a_tiny_model(tmp_path):
    lm = tiny(vocab_size=259, max_position_embeddings=4096)
    drafter = KangarooConfig(adapter="untrained:2", steps=3, threshold=0)
    with pytest.raises(ConfigError, match="vanilla is measured beside a drafter; pass drafter="):
        speed.measure(lm, byte_tokenizer(), VanillaConfig(), speed.SpeedConfig())
    with pytest.raises(ConfigError, match=r"no context of speed\.contexts=\[9999\] fits"):
        speed.measure(lm, byte_tokenizer(), drafter, speed.SpeedConfig(contexts=[9999]))
    config = speed.SpeedConfig(prompts=2, max_new_tokens=8, repeats=1, bandwidth_megabytes=1)
    config.contexts, config.context_tokens, config.batches = [32, 96, 4095], 6, [1, 3]
    result = speed.measure(lm, byte_tokenizer(), drafter, config)
    console = Console(width=200, record=True)
    speed.write(result, tmp_path, console)

    assert json.loads((tmp_path / "speed.json").read_text()) == json.loads(json.dumps(result))
    methods = "hf", "vanilla", "kangaroo"
    rows = [(row["context"], row["method"]) for row in result["contexts"]]
    assert rows == [(context, name) for context in (32, 96) for name in methods]
    assert result["contexts"][-1]["kv_mb"] == lm.n_layers * KV * 96 / 1e6
    assert [b["batch"] for b in result["batches"]] == [1, 3]
    assert [v["tokens"] for v in result["verifications"]] == speed.WIDTHS
    assert result["provenance"]["versions"]["torch"] == version("torch")
    shown, saved = console.export_text(), (tmp_path / "speed.md").read_text()
    for name, title in speed.TITLES.items():
        rows = result[name]
        assert all(list(row) == list(rows[0]) for row in rows)
        for words in (title, *rows[0], *map(speed.cell, rows[-1].values())):
            assert words.replace("_", " ") in shown and words.replace("_", " ") in saved


@pytest.mark.parametrize("value", EXTREMES, ids=repr)
def test_no_field_of_a_generation_config_changes_the_baseline(value):
    """All fields have that value, so each of them would."""
    lm = TargetModel(tiny_model("llama"))
    (prompt,) = random_prompts(6)
    expected = vanilla_texts(lm, [prompt], 5)[0][len(prompt) :]
    vars(lm.hf.generation_config).update(dict.fromkeys(FIELDS, value))
    own = lm.hf.generation_config
    assert generate(lm, prompt, 5, eos_ids=[1]).tokens == expected
    assert lm.hf.generation_config is own and vars(own)["top_k"] == value


def test_what_is_ignored_of_a_generation_config_is_said_once(tmp_path, caplog):
    tiny_model("llama", vocab_size=259).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    nothing = {"eos_token_id": 257, "use_cache": True, "output_scores": False, "top_p": 1.0}
    asked = {"do_sample": True, "repetition_penalty": 1.1, "stop_strings": ["a"]}
    for settings, said in ((nothing, []), (nothing | asked, list(asked.items()))):
        file.write_text(json.dumps(settings))
        load_target(ModelConfig("x", str(tmp_path)))
        named = ", ".join(f"{name}={value!r}" for name, value in said)
        ignored = [text for text in caplog.messages if "generation config" in text]
        assert len(ignored) == bool(said) and all(f"has {named}, which" in x for x in ignored)
