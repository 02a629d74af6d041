"""The speed benchmark: what is counted and how, never how fast this machine is."""

import json
import logging
from importlib.metadata import version

import pytest
from helpers import EXIT, VOCABULARY, adapter_for, random_prompts, tiny, vanilla_texts
from kangaroo.evaluation.speed.bandwidth import Reads
from kangaroo.evaluation.speed.batches import WIDTHS, throughput
from rich.console import Console

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.speed import report
from kangaroo.evaluation.speed.speed import (
    SpeedConfig,
    against_vanilla,
    fitting_contexts,
    measure,
    summarise,
)
from kangaroo.evaluation.speed.trials import (
    Trial,
    long_prompt,
    question_prompts,
    take_turns,
    timed_engine,
    timed_generate,
)
from kangaroo.models.attention import ATTENTION
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError

# The tiny target in float32: width 32, 4 query and 2 key/value heads of 8, feed-forward 64. A layer
# has q and o, k and v, gate, up and down, and two norms.
LAYERS = 6
LAYER = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
ADAPTER = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32)  # no feed-forward part
NORM = 4 * 32
HEAD = 4 * 64 * 32
ROW = 4 * 32
KV = 4 * 2 * 2 * 8  # of one token in one layer


def trial(seconds=1.0, rounds=((1, 0),) * 4, tokens=None, **fields):
    tokens = tokens or list(range(1 + sum(n for n, _ in rounds)))
    return Trial(10, tokens, 0.5, seconds, list(rounds), **fields)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vanilla_token_reads_every_layer_the_head_once_and_the_occupied_kv(tied):
    lm = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    assert (lm.head.weight is lm.hf.model.embed_tokens.weight) == tied
    read = ROW + LAYERS * (LAYER + 10 * KV) + NORM + HEAD
    assert Reads(lm).round(length=10, drafted=0) == read


def test_a_kangaroo_round_reads_shallow_layers_adapter_and_head_for_each_draft_token():
    lm = tiny(num_hidden_layers=LAYERS)
    reads, part = (Reads(lm, adapter_for(lm), size) for size in (None, VOCABULARY // 4))
    assert reads.draft(10, 2) - part.draft(10, 2) == 2 * (HEAD - HEAD // 4)
    assert reads.round(10, 0) == Reads(lm).round(10, 0)  # vanilla's, without draft tokens
    shallow = sum(ROW + EXIT * (LAYER + length * KV) for length in (10, 11, 12))
    adapted = sum(ADAPTER + HEAD + length * KV for length in (10, 11))
    assert reads.draft(length=10, drafted=2) == shallow + adapted
    deep = (LAYERS - EXIT) * (LAYER + 12 * KV)
    assert reads.verify(length=10, drafted=2) == deep + NORM + HEAD


def test_all_methods_write_the_same_text_past_eos_and_the_first_round_is_not_decoding():
    lm = tiny()
    prompt = random_prompts(12)[0]
    text = vanilla_texts(lm, [prompt], 10)[0][len(prompt) :]
    lm.hf.generation_config.eos_token_id = text[3]
    drafter = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0)
    vanilla, kangaroo = (timed_engine(Engine(lm, each)) for each in (Vanilla(), drafter))
    for write in (timed_generate(lm), vanilla, kangaroo):
        written = write(prompt, 10)
        assert written.tokens == text and written.prompt_tokens == 12
        assert lm.hf.config._attn_implementation == ATTENTION
        if write is not kangaroo:
            assert written.rounds == [(1, 0)] * 9 and written.lengths() == list(range(13, 22))


def test_methods_take_turns_and_each_is_first_equally_often():
    order = []

    def method(name):
        return lambda prompt, new_tokens: order.append((name, prompt[0])) or trial(tokens=prompt)

    trials = take_turns({name: method(name) for name in "abc"}, [[0], [1], [2]], 5, 3, "test")
    for of_prompts in trials.values():
        assert [[t.tokens for t in each] for each in of_prompts] == [[[i]] * 3 for i in range(3)]
    for prompt in range(3):
        first = [name for name, asked in order[::3] if asked == prompt]
        assert sorted(first) == ["a", "b", "c"]


def test_the_speedup_is_the_ratio_of_total_seconds_for_as_many_tokens_of_each_prompt():
    loads = 1.0, 10.0, 1.0  # the machine is slow for a while
    seconds = (8.0, 4.0), (16.0, 4.0), (12.0, 12.0)
    vanilla = [[trial(load * theirs) for load in loads] for theirs, _ in seconds]
    # half as many tokens
    method = [[trial(load * own / 2, ((1, 0),) * 2) for load in loads] for _, own in seconds]
    result = against_vanilla(vanilla, method)
    assert result["speedup"] == pytest.approx(36 / 20)
    assert 1.0 <= result["speedup_ci95"][0] < 36 / 20 < result["speedup_ci95"][1] <= 4.0
    assert result == against_vanilla(vanilla, method)
    texts = [[trial(tokens=[5, 9])], [trial(tokens=[7, 7])]]
    assert against_vanilla(texts, [texts[0], [trial(tokens=[7, 8])]])["equal_texts"] == 1


def test_the_results_of_a_method_belong_together():
    reads = Reads(tiny(), adapter_for(tiny()))
    text = trial(2.0, [(3, 4), (1, 2)], draft_seconds=0.6, verify_seconds=1.0)
    size = reads.round(11, 4) + reads.round(14, 2)
    result = summarise([text], reads, bandwidth=size / 0.5)
    assert result["tokens_per_second"] == 2 and result["ms_per_token"] == 500
    assert result["limit_ms_per_token"] == pytest.approx(125)
    assert result["share_of_limit"] == pytest.approx(0.25)
    assert result["compression_rate"] == 2 and result["drafted_per_round"] == 3
    parts = [result[f"{part}_ms"] for part in ("draft", "verify", "host")]
    assert parts == pytest.approx([300, 500, 200])
    drafted = (reads.draft(11, 4) + reads.draft(14, 2)) * 0.5 / size
    assert result["draft_over_limit"] == pytest.approx(0.6 / drafted)
    result = summarise([trial()], None, bandwidth=1e9)
    names = "draft_ms", "verify_ms", "host_ms", "limit_ms_per_token", "share_of_limit"
    assert {result[name] for name in (*names, "draft_over_limit")} == {None}  # not known


@pytest.mark.parametrize("length", [16, 256, 1024, 20_000])
def test_a_long_prompt_has_exactly_its_length_and_ends_as_the_chat_template_does(length):
    tokenizer = byte_tokenizer()
    ids = long_prompt(tokenizer, length)
    question = prompt_ids(tokenizer, [Message(role="user", content="...")])
    assert len(ids) == length and ids[-6:] == question[-6:]


def test_questions_are_spread_and_those_beyond_the_model_are_left_out_and_counted(caplog):
    tokenizer = byte_tokenizer()
    every = question_prompts(tokenizer, 66, BenchConfig(), longest=5000)
    assert question_prompts(tokenizer, 6, BenchConfig(), longest=5000) == every[5::11]
    lengths = sorted(map(len, every))
    longest = lengths[-3]
    kept = question_prompts(tokenizer, 66, BenchConfig(), longest)
    assert max(map(len, kept)) == longest
    assert "2 questions are left out" in caplog.text and str(longest) in caplog.text
    with pytest.raises(ConfigError, match=r"no question of demo.*10 tokens"):
        question_prompts(tokenizer, 6, BenchConfig(), longest=10)


def test_contexts_beyond_the_model_are_left_out_and_settings_that_leave_nothing_refused(caplog):
    lm = tiny()  # 512 positions
    drafters = [Vanilla(), Kangaroo(lm, adapter_for(lm), steps=6), PromptLookup(num_pred_tokens=9)]
    with caplog.at_level(logging.WARNING):
        config = SpeedConfig(contexts=[128, 488, 489], context_tokens=24)
        assert fitting_contexts(lm, drafters, config) == [128, 488]
    assert "489" in caplog.text and "488 " not in caplog.text
    for wrong, words in (
        ({"max_new_tokens": 10}, "must be 11 or more"),  # than the longest round of any drafter
        ({"context_tokens": 10}, "must be 11 or more"),
        ({"contexts": [600]}, r"no context of speed\.contexts"),
    ):
        with pytest.raises(ConfigError, match=words):
            fitting_contexts(lm, drafters, SpeedConfig(**wrong))


def test_throughput_makes_as_many_steps_as_its_texts_need(monkeypatch):
    """The prefill gives the first token of each; a step without a row that decodes is none."""
    lm = tiny().compile_for_decoding()
    steps, step = [], Engine.step

    def counted(engine, batch):
        assert not all(batch.done)
        steps.append(batch.size)
        return step(engine, batch)

    monkeypatch.setattr(Engine, "step", counted)
    rows = throughput(lm, Kangaroo(lm, adapter_for(lm), 3, 0.0), random_prompts(9, 12), 8, [1, 2])
    assert [row["batch"] for row in rows] == [1, 2] and all(row["ratio"] > 0 for row in rows)
    vanilla = 2 * (8 - 1)  # two texts a row
    assert vanilla < steps.count(1) <= 2 * vanilla and vanilla < steps.count(2) <= 2 * vanilla


def test_a_batch_whose_cache_has_no_room_is_left_out(monkeypatch, caplog):
    lm = tiny(num_hidden_layers=LAYERS)
    of_row = LAYERS * KV * (12 + 8)
    monkeypatch.setattr(memory, "free", lambda device: 3 * of_row)
    rows = throughput(lm, Kangaroo(lm, adapter_for(lm)), random_prompts(12), 8, [1, 2, 4])
    assert [row["batch"] for row in rows] == [1, 2]
    assert f"batch 4 is left out: its cache would take {4 * of_row} bytes" in caplog.text


def test_the_whole_benchmark_on_a_tiny_model(tmp_path):
    lm = tiny(vocab_size=259, max_position_embeddings=4096)
    for drafter, more, words in (
        (Vanilla(), {}, "drafter=kangaroo"),
        (Kangaroo(lm, adapter_for(lm)), {"hf": Vanilla()}, r"more\.hf: that name is taken"),
    ):
        with pytest.raises(ConfigError, match=words):
            measure(lm, byte_tokenizer(), drafter, SpeedConfig(), more)
    config = SpeedConfig(
        prompts=2, max_new_tokens=8, repeats=1, contexts=[32, 96], context_tokens=6
    )
    config.batches, config.bandwidth_megabytes = [1, 3], 1
    drafter = Kangaroo(lm, adapter_for(lm), 3, 0.0)
    more = {"lookup": PromptLookup(num_pred_tokens=3)}
    result = measure(lm, byte_tokenizer(), drafter, config, more)
    console = Console(width=200, record=True)
    report.write(result, tmp_path, console)

    assert json.loads((tmp_path / "speed.json").read_text()) == json.loads(json.dumps(result))
    methods = result["methods"]
    assert set(methods) == {"hf", "hf_lookup", "vanilla", "kangaroo", "lookup"}
    assert {m["equal_texts"] for m in methods.values()} == {2}
    assert methods["vanilla"]["compression_rate"] == 1 and methods["vanilla"]["speedup"] == 1
    assert [c["context"] for c in result["contexts"]] == [32, 96]
    assert result["contexts"][1]["kv_bytes"] == lm.n_layers * KV * 96
    assert [b["batch"] for b in result["batches"]] == [1, 3]
    assert [v["tokens"] for v in result["verifications"]] == WIDTHS
    assert result["provenance"]["versions"]["torch"] == version("torch")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    shown, saved = console.export_text(), (tmp_path / "speed.md").read_text()
    for title, rows in report.sheets(result).items():
        assert all(list(row) == list(rows[0]) for row in rows)
        for words in (title, *rows[0], *rows[-1].values()):
            assert words in shown and words in saved
