"""Chat templates and self-synthesis."""

import json
import shutil
from dataclasses import replace

import pytest

from kangaroo import models
from kangaroo.data import store
from kangaroo.data.chat import prompt_ids, user_header
from kangaroo.data.synthesis import SynthesisConfig, synthesise
from kangaroo.errors import ConfigError, DataError, PromptError
from kangaroo.model import LM
from kangaroo.models import TINY, Dtype, ModelConfig


@pytest.fixture(scope="module")
def target():
    hf, tokenizer = models.load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))
    return LM(hf), tokenizer


def settings(path, **changes):
    fields = {
        "shards": 3, "shard_size": 4, "batch_size": 3, "max_question_tokens": 8,
        "max_answer_tokens": 12, "keep_unfinished_questions": True,
    }  # fmt: skip
    return SynthesisConfig(path=str(path), **(fields | changes))


def test_user_header_is_the_template_up_to_the_question(target):
    _, tokenizer = target
    header, end = user_header(tokenizer)
    assert tokenizer.decode(header) == "<|im_start|>user\n"
    assert end == "<|im_end|>"


def test_vicuna_header_ends_where_the_assistant_begins(target):
    _, tokenizer = target
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    tokenizer.chat_template = models.chat_template("vicuna")
    header, end = user_header(tokenizer)
    assert tokenizer.decode(header).endswith("USER: ")
    assert end == "ASSISTANT:"


def test_empty_questions_and_missing_templates_are_refused(target):
    _, tokenizer = target
    with pytest.raises(PromptError, match="empty"):
        prompt_ids(tokenizer, [{"role": "user", "content": "  "}])
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no chat template"):
        prompt_ids(bare, [{"role": "user", "content": "Hi"}])


def test_samples_are_prompts_with_the_answer_masked_in(target, tmp_path):
    lm, tokenizer = target
    synthesise(lm, tokenizer, settings(tmp_path / "data"))
    samples, about = store.load(tmp_path / "data")
    assert len(samples) > 5
    for sample in samples:
        prompt = prompt_ids(tokenizer, sample["messages"][:1])
        assert sample["input_ids"][: len(prompt)] == prompt  # BOS and template as at inference
        assert sample["loss_mask"] == [0] * len(prompt) + [1] * (
            len(sample["input_ids"]) - len(prompt)
        )
    questions = [sample["messages"][0]["content"] for sample in samples]
    assert len(set(questions)) == len(questions)
    assert about["settings"]["model"] == TINY and about["conversations"] == len(samples)


def test_an_interrupted_synthesis_ends_with_the_same_data(target, tmp_path):
    lm, tokenizer = target
    synthesise(lm, tokenizer, settings(tmp_path / "whole"))
    synthesise(lm, tokenizer, settings(tmp_path / "stopped"))
    shutil.rmtree(tmp_path / "stopped")
    shards = tmp_path / "stopped.shards"
    (shards / "00001.jsonl").rename(shards / "00001.part")
    (shards / "00002.jsonl").unlink()
    text = (shards / "00001.part").read_text()
    (shards / "00001.part").write_text(text[: len(text) // 2])
    synthesise(lm, tokenizer, settings(tmp_path / "stopped"))
    assert store.load(tmp_path / "whole")[0] == store.load(tmp_path / "stopped")[0]


def test_more_shards_keep_those_that_are_there(target, tmp_path):
    lm, tokenizer = target
    synthesise(lm, tokenizer, settings(tmp_path / "data", shards=1))
    (first,) = (tmp_path / "data.shards").glob("*.jsonl")
    written = first.stat().st_mtime_ns
    few, _ = store.load(tmp_path / "data")
    synthesise(lm, tokenizer, settings(tmp_path / "data"))
    more, _ = store.load(tmp_path / "data")
    assert first.stat().st_mtime_ns == written
    assert more[: len(few)] == few and len(more) > len(few)


def test_shards_of_other_settings_are_refused_by_name(target, tmp_path):
    lm, tokenizer = target
    first = settings(tmp_path / "data")
    synthesise(lm, tokenizer, first)
    with pytest.raises(DataError, match="seed=0 there, 7 now"):
        synthesise(lm, tokenizer, replace(first, seed=7))


def test_a_model_that_never_ends_a_question_is_an_error(target, tmp_path):
    lm, tokenizer = target
    with pytest.raises(DataError, match="none of 2 conversations is usable"):
        synthesise(
            lm, tokenizer,
            settings(tmp_path / "d", shards=1, shard_size=2, max_question_tokens=1,
                     keep_unfinished_questions=False),
        )  # fmt: skip


def test_changed_or_missing_data_is_refused(target, tmp_path):
    lm, tokenizer = target
    with pytest.raises(DataError, match="no complete dataset"):
        store.load(tmp_path / "none")
    synthesise(lm, tokenizer, settings(tmp_path / "data"))
    path = tmp_path / "data" / store.PROVENANCE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 16}))
    with pytest.raises(DataError, match="not what its provenance"):
        store.load(tmp_path / "data")
