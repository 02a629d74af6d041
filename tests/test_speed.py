"""The speed benchmark: what is counted and how, never how fast this machine is."""

import json
import logging
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from helpers import EXIT, VOCABULARY, adapter_for, random_prompts, tiny, vanilla_texts
from rich.console import Console

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import clock, memory
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.methods import transformers_attention
from kangaroo.evaluation.speed import speed_report
from kangaroo.evaluation.speed.bandwidth import Reads, memory_bandwidth
from kangaroo.evaluation.speed.rivals import static_cache
from kangaroo.evaluation.speed.speed import (
    SpeedConfig,
    equal_texts,
    fitting_contexts,
    measure,
    past_eos,
    speedup,
    speedups_of,
    summarise,
    typical,
)
from kangaroo.evaluation.speed.speed_batches import throughput
from kangaroo.evaluation.speed.speed_trials import (
    Trial,
    long_prompt,
    question_prompts,
    take_turns,
    timed_engine,
    timed_generate,
)
from kangaroo.models.attention import ATTENTION
from kangaroo.models.loading import byte_tokenizer
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


def trial(method="vanilla", prompt=0, repeat=0, seconds=1.0, rounds=((1, 0),) * 4, **fields):
    tokens = list(range(1 + sum(n for n, _ in rounds)))
    where = {"method": method, "prompt": prompt, "repeat": repeat}
    return replace(Trial(10, tokens, 0.5, seconds, list(rounds), **where), **fields)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vanilla_token_reads_every_layer_the_head_once_and_the_occupied_kv(tied):
    lm = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    assert (lm.head.weight is lm.hf.model.embed_tokens.weight) == tied
    read = ROW + LAYERS * (LAYER + 10 * KV) + NORM + HEAD
    assert Reads.of(lm).round(length=10, drafted=0) == read


def test_a_kangaroo_round_reads_shallow_layers_adapter_and_head_for_each_draft_token():
    lm = tiny(num_hidden_layers=LAYERS)
    reads = Reads.of(lm, adapter_for(lm))
    shallow = sum(ROW + EXIT * (LAYER + length * KV) for length in (10, 11, 12))
    adapted = sum(ADAPTER + HEAD + length * KV for length in (10, 11))
    assert reads.draft(length=10, drafted=2) == shallow + adapted
    deep = (LAYERS - EXIT) * (LAYER + 12 * KV)
    assert reads.verify(length=10, drafted=2) == deep + NORM + HEAD


def test_a_draft_vocabulary_reads_its_share_of_the_head():
    lm = tiny(num_hidden_layers=LAYERS)
    whole, part = (Reads.of(lm, adapter_for(lm), size) for size in (None, VOCABULARY // 4))
    assert whole.draft(10, 2) - part.draft(10, 2) == 2 * (HEAD - HEAD // 4)
    assert whole.verify(10, 2) == part.verify(10, 2)


def test_a_round_without_draft_tokens_reads_what_a_vanilla_token_reads():
    lm = tiny()
    assert Reads.of(lm, adapter_for(lm)).round(10, 0) == Reads.of(lm).round(10, 0)


def test_half_the_bytes_in_half_the_precision():
    lm, half = tiny(), tiny(dtype=torch.bfloat16)
    assert Reads.of(lm).round(10, 0) == 2 * Reads.of(half).round(10, 0)


def test_bandwidth_is_bytes_of_the_buffer_over_the_median_time(monkeypatch):
    ticks = iter(i / 4 for i in range(1000))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    assert memory_bandwidth(torch.device("cpu"), megabytes=1) == 4 * 2**20


def test_transformers_has_its_own_attention_only_inside():
    lm = tiny()
    with transformers_attention(lm):
        assert lm.hf.config._attn_implementation == "sdpa"
    assert lm.hf.config._attn_implementation == ATTENTION


def test_attention_comes_back_after_an_error():
    lm = tiny()
    with pytest.raises(KeyError), transformers_attention(lm):
        raise KeyError
    assert lm.hf.config._attn_implementation == ATTENTION


def test_all_methods_write_the_same_text_past_eos():
    lm = tiny()
    prompt = random_prompts(12)[0]
    text = vanilla_texts(lm, [prompt], 10)[0][len(prompt) :]
    lm.hf.generation_config.eos_token_id = text[3]
    drafter = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0)
    engines = [timed_engine(Engine(lm, one)) for one in (Vanilla(), drafter)]
    for write in (timed_generate(lm), *engines):
        written = write(prompt, 10)
        assert written.tokens == text
        assert lm.hf.config._attn_implementation == ATTENTION


def test_the_first_round_is_not_part_of_decoding():
    lm = tiny()
    prompt = random_prompts(12)[0]
    for write in (timed_generate(lm), timed_engine(Engine(lm, Vanilla()))):
        written = write(prompt, 10)
        assert written.rounds == [(1, 0)] * 9 and written.prompt_tokens == 12
        assert written.lengths() == list(range(13, 22))


def test_lengths_count_what_each_round_wrote():
    assert trial(rounds=[(3, 4), (1, 2), (2, 4)]).lengths() == [11, 14, 15]


def test_methods_take_turns_and_each_is_first_equally_often():
    order = []

    def method(name):
        def write(prompt, new_tokens):
            order.append((name, prompt[0], new_tokens))
            return trial()

        return write

    trials = take_turns({n: method(n) for n in "abc"}, [[0], [1], [2]], 5, 3, "test")
    assert [(t.method, t.prompt, 5) for t in trials] == order
    first = [name for name, _, _ in order[::3]]
    for prompt in range(3):
        assert sorted(first[prompt::3]) == ["a", "b", "c"]
    assert [t.repeat for t in trials] == sorted([0, 1, 2] * 9)


def test_the_typical_trial_is_the_median_one_of_each_prompt():
    times = {0: (3.0, 1.0, 2.0), 1: (5.0, 6.0, 9.0)}
    trials = [trial("vanilla", p, r, t) for p, ts in times.items() for r, t in enumerate(ts)]
    trials += [replace(t, method="hf", decode_seconds=0.1) for t in trials]
    assert [t.decode_seconds for t in typical(trials, "vanilla")] == [2.0, 6.0]


def test_the_speedup_is_the_ratio_of_total_seconds_for_as_many_tokens_of_each_prompt():
    trials = []
    for prompt, (theirs, ours) in enumerate([(8.0, 4.0), (16.0, 4.0), (12.0, 12.0)]):
        for repeat, load in enumerate((1.0, 10.0, 1.0)):  # the machine is slow for a while
            trials.append(trial("kangaroo", prompt, repeat, load * ours / 2, rounds=((1, 0),) * 2))
            trials.append(trial("vanilla", prompt, repeat, load * theirs))  # twice as many tokens
    found = speedup(trials, "kangaroo", "vanilla")
    assert found["seconds_of_prompt"] == [[8.0, 4.0], [16.0, 4.0], [12.0, 12.0]]
    assert found["speedup"] == 36 / 20 and found["range"] == [1.0, 4.0]
    assert 1.0 <= found["speedup_ci95"][0] < 36 / 20 < found["speedup_ci95"][1] <= 4.0
    assert found == speedup(trials, "kangaroo", "vanilla")


def test_tokens_past_the_first_eos_are_counted():
    texts = [5, 9, 5, 9], [5, 5, 5, 5]
    assert past_eos([trial(tokens=text) for text in texts], {9}) == 2 / 8


def test_the_results_of_a_method_belong_together():
    reads = Reads.of(tiny(), adapter_for(tiny()))
    one = trial(
        "kangaroo", seconds=2.0, rounds=[(3, 4), (1, 2)], draft_seconds=0.6, verify_seconds=1.0
    )
    size = reads.round(11, 4) + reads.round(14, 2)
    found = summarise([one], reads, bandwidth=size / 0.5)
    assert found["tokens_per_second"] == 2 and found["ms_per_token"] == 500
    assert found["limit_tokens_per_second"] == pytest.approx(8)
    assert found["share_of_limit"] == pytest.approx(0.25)
    assert found["compression_rate"] == 2 and found["drafted_per_round"] == 3
    parts = [found[f"{part}_ms_per_round"] for part in ("draft", "verify", "host")]
    assert parts == pytest.approx([300, 500, 200]) and sum(parts) == found["ms_per_round"]
    assert found["ms_per_draft_token"] == pytest.approx(100)


def test_generate_has_no_split():
    found = summarise([trial("hf")], Reads.of(tiny()), bandwidth=1e9)
    assert found["draft_ms_per_round"] is None and found["ms_per_draft_token"] is None


@pytest.mark.parametrize("length", [16, 256, 1024, 20_000])
def test_a_long_prompt_has_exactly_its_length_and_both_ends_of_the_chat_template(length):
    tokenizer = byte_tokenizer()
    ids = long_prompt(tokenizer, length)
    assert len(ids) == length
    short = question_prompts(tokenizer, 1, BenchConfig(), longest=5000)[0][0]
    assert ids[:6] == short[:6] and ids[-6:] == short[-6:]


def test_questions_are_spread_over_the_tasks():
    prompts, tasks = question_prompts(byte_tokenizer(), 60, BenchConfig(), longest=5000)
    assert len({tuple(p) for p in prompts}) == 60
    assert set(Counter(tasks).values()) == {10} and len(set(tasks)) == 6
    some, few = question_prompts(byte_tokenizer(), 8, BenchConfig(), longest=5000)
    assert sorted(Counter(few).values()) == [1, 1, 1, 1, 2, 2] and len(some) == 8


def test_questions_beyond_the_model_are_left_out_and_counted(caplog):
    tokenizer = byte_tokenizer()
    lengths = sorted(map(len, question_prompts(tokenizer, 60, BenchConfig(), longest=5000)[0]))
    longest = lengths[-3]
    kept, _ = question_prompts(tokenizer, 66, BenchConfig(), longest)
    assert max(map(len, kept)) == longest
    assert "2 questions are left out" in caplog.text and str(longest) in caplog.text
    with pytest.raises(ConfigError, match=r"no question of demo.*10 tokens"):
        question_prompts(tokenizer, 6, BenchConfig(), longest=10)


def test_contexts_beyond_the_model_are_left_out_and_named(caplog):
    lm = tiny()  # 512 positions
    config = SpeedConfig(contexts=[128, 488, 489], context_tokens=24)
    with caplog.at_level(logging.WARNING):
        assert fitting_contexts(lm, [Kangaroo(lm, adapter_for(lm))], config) == [128, 488]
    assert "489" in caplog.text and "488 " not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 7},
        {"context_tokens": 7},
        {"contexts": [600]},
        {"phase_context": 470},
    ],
)
def test_settings_that_leave_nothing_to_measure_are_refused(wrong):
    lm = tiny()
    with pytest.raises(ConfigError, match=r"speed\."):
        fitting_contexts(lm, [Kangaroo(lm, adapter_for(lm), steps=6)], SpeedConfig(**wrong))


def test_a_text_is_longer_than_the_longest_round_of_any_drafter():
    lm = tiny()
    drafters = [Vanilla(), Kangaroo(lm, adapter_for(lm), steps=6), PromptLookup(num_pred_tokens=9)]
    assert fitting_contexts(lm, drafters[:2], SpeedConfig(contexts=[32], context_tokens=8)) == [32]
    with pytest.raises(ConfigError, match="must be 11 or more"):
        fitting_contexts(lm, drafters, SpeedConfig(contexts=[32], context_tokens=8))


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


def test_another_drafter_is_refused():
    with pytest.raises(ConfigError, match="drafter=kangaroo"):
        measure(tiny(), byte_tokenizer(), Vanilla(), SpeedConfig())


def test_a_further_drafter_cannot_have_the_name_of_another_method():
    lm = tiny()
    drafter = Kangaroo(lm, adapter_for(lm))
    with pytest.raises(ConfigError, match=r"more\.hf: that name is taken"):
        measure(lm, byte_tokenizer(), drafter, SpeedConfig(), {"hf": Vanilla()})


def test_each_of_ours_is_compared_with_all_others_and_with_those_of_ours_before_it():
    names = ["hf", "vanilla", "kangaroo", "hybrid", "llama_bf16"]
    trials = [trial(name, seconds=n + 1.0) for n, name in enumerate(names)]
    found = speedups_of(trials, names, ["vanilla", "kangaroo", "hybrid"])
    assert {pair: round(one["speedup"], 2) for pair, one in found.items()} == {
        "vanilla/hf": 0.5,
        "vanilla/llama_bf16": 2.5,
        "kangaroo/hf": 0.33,
        "kangaroo/llama_bf16": 1.67,
        "kangaroo/vanilla": 0.67,
        "hybrid/hf": 0.25,
        "hybrid/llama_bf16": 1.25,
        "hybrid/vanilla": 0.5,
        "hybrid/kangaroo": 0.75,
    }


def test_texts_are_compared_up_to_vanillas_first_eos():
    texts = {"vanilla": [5, 9, 6], "after": [5, 7, 7], "before": [4, 9, 6]}
    trials = [trial(name, tokens=text) for name, text in texts.items()]
    assert equal_texts(trials, {9}) == {"vanilla": 1, "after": 1, "before": 0}
    assert equal_texts(trials, {1}) == {"vanilla": 1, "after": 0, "before": 0}


def test_the_whole_benchmark_on_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path))
    lm = tiny(vocab_size=259, max_position_embeddings=4096)
    config = SpeedConfig(prompts=2, max_new_tokens=8, repeats=1, phase_context=40)
    config.contexts, config.context_tokens = [32, 96], 6
    config.batches, config.bandwidth_megabytes = [1, 3], 1
    drafter, more = (
        Kangaroo(lm, adapter_for(lm), 3, 0.0),
        {"lookup": PromptLookup(num_pred_tokens=3)},
    )
    result = measure(lm, byte_tokenizer(), drafter, config, more)
    console = Console(width=200, record=True)
    result["static"] = static_cache(lm, long_prompt(byte_tokenizer(), 40), 6)
    speed_report.write(result, tmp_path)
    speed_report.show(result, console)

    assert json.loads((tmp_path / "speed.json").read_text()) == json.loads(json.dumps(result))
    rivals = ["hf_lookup", "hf_early_exit", "hf_truncated", "hf_assistant"]
    llama = ["llama_f32", "llama_ngram", "llama_q4_1"]
    there = [name for name in llama if name not in result["skipped"]]
    assert there == (llama[:2] if find_spec("xllamacpp") else [])
    assert set(result["methods"]) == {"hf", *result["ours"], *rivals, *there}
    assert result["ours"] == ["vanilla", "kangaroo", "lookup"]
    methods = len(result["methods"])
    assert len(result["trials"]) == methods * 2 + 3 * 2
    assert all(sum(n for n, _ in t["rounds"]) < 8 for t in result["trials"])
    assert [c["context"] for c in result["contexts"]] == [32, 96]
    assert result["contexts"][1]["kv_bytes"] == lm.n_layers * KV * 96
    assert result["equal_texts"] == dict.fromkeys(result["methods"], 2)
    assert [b["batch"] for b in result["batches"]] == [1, 3]
    for step in result["phases"]["steps"].values():
        assert sum(step["phases"].values()) == pytest.approx(step["ms"])
    assert result["methods"]["vanilla"]["compression_rate"] == 1
    assert result["provenance"]["versions"]["torch"] == version("torch")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    shown, saved = console.export_text(), (tmp_path / "speed.md").read_text()
    assert (
        "Texts that are vanilla's up to its first EOS, of 2: hf 2, vanilla 2, Kangaroo 2" in saved
    )
    assert "with its static cache" in shown and "at context 40." in saved
    assert "llama_q4_1 skipped: " in shown and "llama_q4_1 skipped: " in saved
    for title, rows in speed_report.sheets(result).items():
        assert all(list(row) == list(rows[0]) for row in rows)
        for words in (title, *rows[0], *rows[-1].values()):
            assert words in shown and words in saved
