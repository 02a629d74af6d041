"""A training loads no more of its target than it reads."""

from pathlib import Path

import pytest
from data.data_cases import NO_FILTERS, settings
from helpers import recipe_of
from tiny_gguf import write
from training_cases import config, train

from kangaroo.data import store
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.loading import Dtype, ModelConfig
from kangaroo.models.random_models import byte_tokenizer, random_model
from kangaroo.training.estimate import target_bytes
from kangaroo.training.targets import layers_read, target_with_data
from kangaroo.utils.ranks import ALONE


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of six layers, and what it wrote, with its distributions."""
    folder = tmp_path_factory.mktemp("written")
    random_model().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    model = ModelConfig("six", str(folder / "model"), dtype=Dtype.float32, device="cpu")
    data = settings(folder / "data", teacher=4, filters=NO_FILTERS)
    whole = target_with_data(model, data, [recipe_of(exit_layers=[1])], config(), ALONE)
    return model, data, whole


def loaded(lm) -> int:
    return sum(not next(layer.parameters()).is_meta for layer in lm.layers)


@pytest.mark.slow
def test_with_kept_distributions_layers_above_the_adapters_are_not_loaded(written, tmp_path):
    model, data, whole = written
    deeper = recipe_of(name="two", exit_layers=[1], attention_layers=2)
    recipes = [recipe_of(exit_layers=[1]), deeper]
    first = target_with_data(model, data, recipes, config(), ALONE)
    assert (loaded(whole), loaded(first), first.n_layers) == (6, 3, 6)
    samples, about = store.load(Path(data.path))
    weights = []
    for lm in (whole, first):
        folder = tmp_path / str(loaded(lm))
        folders = train(lm, samples, config(), folder, about=about, recipes=recipes)
        weights.append([(folder / "adapter.safetensors").read_bytes() for folder in folders])
    assert weights[0] == weights[1]
    size = 4 * sum(x.numel() for x in whole.parameters())
    assert target_bytes(whole, 3) < target_bytes(whole) == size


@pytest.mark.parametrize(
    "parts, options",
    [({"fused": True}, {}), ({}, {"use_stored_logits": False}), ({}, {"shard_target": True})],
    ids=str,
)
def test_all_layers_are_loaded_where_all_are_read(written, parts, options):
    _, data, whole = written
    recipes = [recipe_of(exit_layers=[1], **parts)]
    assert layers_read(whole, recipes, config(**options), data) is None


def test_a_gguf_target_writes_with_its_own_blocks_and_is_widened_to_train(tmp_path, monkeypatch):
    write(tmp_path / "x.gguf")
    model = ModelConfig("x", str(tmp_path / "x.gguf"), device="cpu")
    data, writers = settings(tmp_path / "data", filters=NO_FILTERS, shards=1), []
    make = type(data).make

    def made(self, lm, *args):
        writers.append(len(packed_linears(lm.layers)))
        make(self, lm, *args)

    monkeypatch.setattr(type(data), "make", made)
    lm = target_with_data(model, data, [recipe_of(exit_layers=[1])], config(), ALONE)
    assert writers == [7 * lm.n_layers] and not packed_linears(lm.layers)
