"""Every number that can be set has a range, beside its field; what lies outside never gets far."""

import re
from dataclasses import fields, is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from composing import DRAFTERS, of_command
from helpers import random_prompts, tiny, vanilla_texts
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

import kangaroo
from kangaroo import ConfigError, KangarooConfig, __main__
from kangaroo.cli.command import check_ranges, combinations
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling

BESIDES = {  # what a command has if it is asked for
    "train": ["data=conversations", "data.source=x", "adapter=eagle"],
    "make_data": ["adapter=medusa"],
    "evaluate": [f"+drafter@more.{name}={name}" for name in DRAFTERS],
}
WRONG = [
    ("train", "trainer.learning_rate=nan"),
    ("evaluate", "drafter.steps=100000"),
    ("evaluate", "sampling.temperature=-1"),
    ("serve", "max_batch_size=0"),
]
WIDE = {"adapter": "untrained:2", "nodes": 1024}


def composed(command, options):
    output = [] if command in ("chat", "serve") else ["output=out"]
    return of_command(command, [*options, *output])


def parts(config):
    """The dataclasses of a composed config."""
    if is_dataclass(kind := OmegaConf.get_type(config)):
        yield kind
    for name in config:
        if not OmegaConf.is_missing(config, name) and isinstance(config[name], DictConfig):
            yield from parts(config[name])


def without_range(hint):
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
        return not limit.auto and hint not in (int, float) and without_range(hint)
    return hint in (int, float) or any(map(without_range, get_args(hint)))


def registered(repo):
    for node in repo.values():
        if isinstance(node, dict):
            yield from registered(node)
        elif is_dataclass(kind := OmegaConf.get_type(node.node)):
            yield kind


def test_every_number_of_every_config_has_a_range():
    kinds = {x for x in registered(ConfigStore.instance().repo) if "kangaroo." in x.__module__}
    for name in __main__.COMMANDS:
        config = composed(name, BESIDES.get(name, []))
        check_ranges(config)
        kinds |= set(parts(config))
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            assert not without_range(hints[field.name]), f"{kind}: {field.name}"


@pytest.mark.parametrize("command, option", WRONG)
def test_a_number_out_of_its_range_is_refused_by_its_place(command, option):
    with pytest.raises(ConfigError, match=f"^{re.escape(option.partition('=')[0])}="):
        check_ranges(composed(command, [option]))


def test_variants_and_what_is_no_number_are_refused():
    with pytest.raises(ConfigError, match=r"steps=60000 must be .* at most 1024"):
        combinations(KangarooConfig(adapter="x"), {"steps": [4, 60000]}, "variants")
    for value in ("0.5", True):
        with pytest.raises(ConfigError, match=r"KangarooConfig\.threshold=.* must be a number"):
            KangarooConfig(threshold=value)


@pytest.mark.parametrize(
    "drafter",
    [
        KangarooConfig(adapter="untrained:2", steps=1024, threshold=0.0),
        KangarooConfig(adapter="untrained:1", threshold=1 - 1e-16),
        kangaroo.KangarooTreeConfig(**WIDE, steps=16, top_k=64, min_confidence=0.0),
        kangaroo.HybridConfig(**WIDE, steps=1024, min_gain_per_step=1e300),
        kangaroo.LookaheadConfig(window=1, ngram=2, guesses=1),
        kangaroo.PromptLookupConfig(max_matching_ngram_size=2**31 - 1, num_pred_tokens=1024),
    ],
    ids=lambda config: config.name,
)
def test_drafters_at_the_ends_of_their_ranges_write_vanillas_text(drafter):
    lm, prompts = tiny().compile_for_decoding(), random_prompts(6)
    how = Sampling(temperature=0.9, top_k=2**31 - 1, seed=2**63 - 2**31)
    (done,) = Engine(lm, drafter.build(lm)).generate(prompts, 12, how)
    assert [prompts[0] + done.tokens] == vanilla_texts(lm, prompts, 12, how)
