"""A target without weights has the published shape, or is refused by name."""

import pytest
from commands import ROOT
from transformers import T5Config

from kangaroo.heads import adapter_files
from kangaroo.models.loading import EMBEDDED, ModelConfig, meta_model
from kangaroo.utils.errors import ModelNotFound, UnsupportedModel

# of the hub's safetensors files, in parameters
PUBLISHED = {
    "lmsys/vicuna-7b-v1.3": 6_738_415_616,
    "lmsys/vicuna-33b-v1.3": 32_528_943_616,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("path", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(path):
    for how in "", "random:":
        assert count(meta_model(ModelConfig("m", how + path))) == PUBLISHED[path]


def test_smollm2_is_the_model_in_the_table(smollm2):
    """Also for an adapter: one that is made from the table alone fits the real target."""
    shape, known = smollm2[0].config.to_dict(), meta_model(ModelConfig("smollm2", EMBEDDED))
    fields = known.config.to_dict()
    assert all(fields[name] == shape[name] for name in ("vocab_size", "max_position_embeddings"))
    shipped = adapter_files.read_config(str(ROOT / "adapters/smollm2-135m"))
    assert adapter_files.target_hash(known) == shipped.target_hash


def test_a_shape_that_is_not_known_or_no_targets_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"model\.path"):
        meta_model(ModelConfig(name="nobody", path="nobody/has-this"))
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot be a target: .*model\.path"):
        meta_model(ModelConfig("t5", str(tmp_path)))
