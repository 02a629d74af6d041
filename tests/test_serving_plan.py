"""Two models on several GPUs, on paper: what is read, what fits, what drafting brings."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import recipe_of
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.estimate.serving import (
    Drafting,
    Pass,
    ServingConfig,
    adapter_drafting,
    best_round,
    held,
    model_drafting,
    room,
    whole_pass,
)
from kangaroo.estimate.serving_report import PLACE, rewrite
from kangaroo.models.loading import ModelConfig
from kangaroo.models.meta_model import blueprint
from kangaroo.utils.errors import ConfigError

ROOT = Path(__file__).parent.parent
LARGE = ModelConfig("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct")
SMALL = ModelConfig("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")
PLAN = ServingConfig(SMALL)
TWO_MODELS = ["model=llama-3.1-70b", "+serving=two_models"]


@pytest.fixture(scope="module")
def lm():
    return blueprint(LARGE)


def composed(*overrides):
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(compose("estimate", ["output=out", *overrides]))


def planned(*overrides):
    inspect.unwrap(cli.estimate)(composed(*TWO_MODELS, *overrides))


def test_one_gpu_holds_and_reads_all_weights_but_the_embeddings(lm):
    every = sum(p.nbytes for p in lm.parameters())
    assert held(lm, 1) == every
    embeddings = lm.hf.model.embed_tokens.weight.nbytes
    norm = lm.hf.model.norm.weight.nbytes
    assert whole_pass(lm, 1).weights == every - embeddings - norm
    assert whole_pass(lm, 1).multiplied * 2 == whole_pass(lm, 1).weights
    assert whole_pass(lm, 1).token == lm.cache_like(1, 1, [lm.device] * lm.n_layers).bytes()


def test_gpus_share_matrices_and_heads_of_keys_and_copy_norms(lm):
    norms = sum(p.nbytes for p in lm.parameters() if p.ndim == 1)
    matrices = held(lm, 1) - norms
    assert held(lm, 8) == matrices / 8 + norms
    token = whole_pass(lm, 1).token
    # of eight heads one is the least that a GPU can have
    for gpus, share in ((4, 4), (8, 8), (16, 8)):
        assert whole_pass(lm, gpus).token == token // share


def test_a_draft_by_the_adapter_reads_the_layers_below_it_itself_and_the_head(lm):
    recipe = recipe_of(exit_layers=[6])
    drafting = adapter_drafting(lm, recipe, None, 1, 0.5)
    adapter = sum(p.numel() for p in recipe.architecture.build(lm, 6, None).parameters()) * 2
    layers = sum(p.nbytes for layer in lm.layers[:6] for p in layer.parameters())
    assert drafting.step.weights == layers + adapter + lm.head.weight.nbytes
    assert drafting.weights == adapter
    assert drafting.step.layers == 7 and drafting.token * lm.n_layers == whole_pass(lm, 1).token
    part = adapter_drafting(lm, recipe, 1024, 1, 0.5)
    rows = 1024 * lm.config.hidden_size * 2
    assert part.step.weights == layers + adapter + rows
    assert part.weights == adapter + rows  # gathered from the head
    trained = adapter_drafting(lm, recipe_of(own_head=True, exit_layers=[6]), 1024, 1, 0.5)
    assert trained.step.weights == part.step.weights and trained.weights == part.weights


@pytest.mark.parametrize("parts", [{"fused": True}, {"attention": False, "feed_forward": True}])
def test_an_adapter_that_vllm_cannot_run_is_refused(lm, parts):
    with pytest.raises(ConfigError, match="does not run in vLLM; pass adapter=attention"):
        adapter_drafting(lm, recipe_of(**parts), None, 8, 0.5)


def test_a_pass_takes_the_time_of_reading_or_of_arithmetic():
    plan = replace(
        PLAN, context=10, bandwidth=1e9, bandwidth_share=0.5, flops=1e10, flops_share=0.5
    )
    step = Pass(weights=2e9, multiplied=1e9, token=1e5, layers=3)
    sums = 6 * plan.sum_seconds
    assert step.seconds(1, 2, plan) == pytest.approx((2e9 + 2e6) / 5e8 + sums)
    assert step.seconds(50, 2, plan) == pytest.approx(2 * 1e9 * 100 / 5e9 + sums)


def test_as_many_tokens_are_drafted_as_pay():
    plan = replace(PLAN, most_steps=40, sum_seconds=0)
    target, none = Pass(1e9, 5e8, 0, 1), Pass(0, 0, 0, 0)
    alone, best = best_round(target, Drafting(0, 0, none, 0.5), 1, plan)
    assert (alone.steps, alone.tokens) == (0, 1)
    assert best.tokens == pytest.approx(2)  # 1 / (1 - 0.5), as far as drafts are free
    assert best.seconds == alone.seconds and best.speed == pytest.approx(2 * alone.speed)
    _, best = best_round(target, Drafting(0, 0, replace(target, weights=6e8), 0.5), 1, plan)
    assert best.steps == 0  # 0.6 of a round for half a token
    _, best = best_round(target, Drafting(0, 0, replace(target, weights=2e8), 0.5), 1, plan)
    # 1.5 tokens in 1.2 rounds; two drafts write 1.75 in 1.4, which is no more
    assert best.steps == 1 and best.tokens == 1.5
    _, many = best_round(target, Drafting(0, 0, replace(target, weights=2e8), 0.5), 500, plan)
    assert many.steps == 0  # arithmetic: each token of a draft takes its time


def test_what_is_left_for_keys_and_values(lm):
    drafting = model_drafting(blueprint(SMALL), 8, 0.7)
    assert room(held(lm, 8), None, PLAN) == 80e9 * 0.92 - 5e9 - held(lm, 8)
    left = room(held(lm, 8), drafting, PLAN)
    assert left == pytest.approx(room(held(lm, 8), None, PLAN) - held(blueprint(SMALL), 8))


def test_the_page_holds_what_the_command_says(caplog):
    caplog.set_level("INFO")
    planned()
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (place,) = PLACE.finditer(page)
    assert place[0] == f"{place[1]}\n{caplog.messages[-1]}\n\n{place[3]}", "make estimate"


def test_commands_name_the_models_and_the_folder_that_export_writes(caplog):
    caplog.set_level("INFO")
    planned("serving.gpus=[4,16]")
    commands = re.findall(r"^(?:\w+=0 )?vllm serve (?:.*\\\n)*.*", caplog.messages[-1], flags=re.M)
    sizes = [re.findall(r"parallel.size\W+(\d+)", command) for command in commands]
    assert sizes == [*2 * [["4", "4"]], *2 * [["16", "16"]]]
    drafts = [json.loads(re.search(r"speculative-config '(.*?)'", c)[1]) for c in commands]
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        exported = compose("export", ["to=vllm", "model=llama-3.1-70b"]).output
    assert [draft["model"] for draft in drafts] == 2 * [SMALL.path, exported]
    assert all(draft["method"] == "draft_model" for draft in drafts)
    assert all(LARGE.path in command for command in commands)


def test_a_plan_is_written_into_its_place_alone(tmp_path):
    page = tmp_path / "page.md"
    text = "a\n<!-- serving: x -->{}<!-- end -->\n<!-- serving: y -->\n<!-- end -->\n"
    page.write_text(text.format("\nold\n"))
    for plan in ("first", "new \\1"):
        rewrite(page, "x", plan)
    assert page.read_text() == text.format("\n\nnew \\1\n\n")
    for file, name in ((page, "z"), (tmp_path / "none.md", "x")):
        with pytest.raises(ConfigError, match=f"no line '<!-- serving: {name} -->'"):
            rewrite(file, name, "text")


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match=r"no text of 4096 tokens fits.*serving\.gpus="):
        planned("serving.gpus=[2]")
    with pytest.raises(ConfigError, match=r"has 32000 tokens and llama-3\.1-70b 128256"):
        planned("model@serving.draft=vicuna-7b")


def test_any_models_can_be_planned_for(caplog):
    caplog.set_level("INFO")
    planned(
        "model=vicuna-33b",
        "model@serving.draft=vicuna-7b",
        "trainer.vocabulary=8192",
        "serving.gpus=[2]",
    )
    plan = caplog.messages[-1]
    assert "vicuna-33b: 32.53 B parameters" in plan and "vicuna-7b: 6.74 B" in plan
    assert "drafting from 8192 tokens" in plan and "float16" in plan


def test_the_adapters_chance_is_that_of_the_paper():
    """0.57 is said to give the 2.3 tokens a round of the paper, at six draft tokens."""
    chance = PLAN.adapter_acceptance
    assert sum(chance**k for k in range(7)) == pytest.approx(2.30, abs=0.03)
