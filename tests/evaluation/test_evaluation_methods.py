"""transformers' `generate` as a baseline: the same decoder whatever the model asks for."""

import json

import pytest
from helpers import random_prompts, tiny_model, vanilla_texts
from transformers import GenerationConfig

from kangaroo.evaluation.methods import generate
from kangaroo.models.loading import ModelConfig, load_target
from kangaroo.models.random_models import byte_tokenizer
from kangaroo.models.target import TargetModel

EXTREMES = (-1, 0, 1, 10**9, 1e-9, True, "a", ["a"], [3], [[3]], [[3, -1.0]], {"a": 1})
FIELDS = sorted(vars(GenerationConfig()).keys() - {"eos_token_id"})  # it ends texts, for all alike


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
