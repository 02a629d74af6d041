"""A million tokens by every drafter, compared with vanilla's: `make soak` (docs/evaluation.md).

SOAK_TOKENS, SOAK_SEED, SOAK_DEVICE, SOAK_DTYPE and SOAK_MODEL in the environment change how much
is decoded, and by which targets; SOAK_OUTPUT is the folder of the certificate.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from cases import case_of

from kangaroo import ConfigError, DrafterConfig, Dtype, NotLossless, Rule
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.tree import accept
from kangaroo.evaluation import records
from kangaroo.utils.discovery import classes
from soak import run
from soak.run import FAMILIES, SAMPLINGS, SOAKED, setting_of

OPTIONS = {"tokens": int, "seed": int, "device": str, "dtype": Dtype, "model": str}


@pytest.mark.soak
@pytest.mark.usefixtures("measured_budget")
def test_every_drafter_writes_vanillas_texts():
    texts = {name: os.environ.get(f"SOAK_{name.upper()}") for name in OPTIONS}
    options = {name: OPTIONS[name](text) for name, text in texts.items() if text}
    folder = Path(os.environ.get("SOAK_OUTPUT", "outputs/soak"))
    certificate = run.soak(SOAKED, folder, **options)
    print(f"\n{certificate['verdict']} The certificate is in {folder}.")


def test_every_drafter_and_family_and_sampling_is_soaked():
    case, names = case_of("llama", "greedy"), classes("kangaroo.drafters", DrafterConfig)
    kinds = {type(build(case)).__name__.lower() for build in SOAKED.values()}
    of_kangaroo = {"eagle", "eagle3", "layerskip"}  # whose classes are Kangaroo's, or EAGLE's tree
    assert kinds == {name.replace("_", "") for name in names} - of_kangaroo | {
        "eagletree",
        "texthybrid",
    }
    assert of_kangaroo < SOAKED.keys()
    numbers = range(len(FAMILIES) * len(SAMPLINGS))  # without a common divisor they all meet
    assert len({(n % len(FAMILIES), n % len(SAMPLINGS)) for n in numbers}) == len(numbers)
    assert all(max(run.FEWEST, 2 * rows) > rows for rows in run.BATCHES)  # rows are refilled
    # under the rejection rule only greedy texts are promised to be vanilla's
    assert all(how.greedy for how in SAMPLINGS.values() if how.rule is Rule.rejection)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(run, "REQUESTS", 8)
    monkeypatch.setattr(run, "LIMIT", (1, 24))
    setting_of.cache_clear()


@pytest.mark.usefixtures("short")
def test_in_half_precision_only_targets_that_keep_the_promise_are_soaked(tmp_path):
    half = [setting_of(number, 0, "cpu", torch.bfloat16) for number in range(3)]
    assert all(s.family.endswith(", compiled") and s.prefill_chunks == (1024,) for s in half)
    assert half[0].lm.dtype == torch.bfloat16
    certificate = run.soak(SOAKED, tmp_path, 600, dtype=Dtype.bfloat16)
    assert certificate["different_texts"] == 0 and certificate["settings"]["dtype"] == "bfloat16"


@pytest.mark.usefixtures("short")
def test_the_certificate_adds_up_and_is_that_of_its_seed(tmp_path):
    certificate = run.soak(SOAKED, tmp_path, 300, seed=1)  # where one token ends texts
    assert certificate["tokens"] >= 300 and certificate["different_texts"] == 0
    assert certificate["ended_by_eos"] > 0
    for groups in certificate["by"].values():
        assert sum(group["tokens"] for group in groups.values()) == certificate["tokens"]
    text = (tmp_path / "certificate.md").read_text()
    assert f"{certificate['tokens']:,} tokens in" in text and "texts that differ: 0." in text
    lines = (tmp_path / run.CELLS).read_bytes().splitlines(keepends=True)
    (tmp_path / "again").mkdir()  # a soak that was killed while it wrote its second cell
    (tmp_path / "again" / records.RUN).write_bytes((tmp_path / records.RUN).read_bytes())
    (tmp_path / "again" / run.CELLS).write_bytes(lines[0] + lines[1][:9])
    assert run.soak(SOAKED, tmp_path / "again", 300, seed=1)["by"] == certificate["by"]
    again = (tmp_path / "again" / run.CELLS).read_bytes().splitlines(keepends=True)
    assert again[0] == lines[0] and len(again) == len(lines) > 1
    with pytest.raises(ConfigError, match="seed"):
        run.soak(SOAKED, tmp_path, 300, seed=2)


@pytest.mark.usefixtures("short")
def test_an_engine_that_accepts_wrong_tokens_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FAMILIES", ["llama"])  # whose rounds are the tensors'

    def unseen(draft, choice_BN):
        """It takes the first draft token as it is."""
        if draft.tree.size > 1:
            valid_B, first_B = draft.valid_BN[:, 1], draft.tokens_BN[:, 1]
            choice_BN[:, 0] = torch.where(valid_B, first_B, choice_BN[:, 0])
        return accept(draft, choice_BN)

    monkeypatch.setattr("kangaroo.engine.stepper.accept", unseen)
    with pytest.raises(NotLossless, match=r"of 8 texts are not vanilla's"):
        run.soak({"lookup": lambda case: PromptLookup(1, 4)}, tmp_path, 1)
    certificate = json.loads((tmp_path / run.CERTIFICATE).read_text())
    assert certificate["different_texts"] == len(certificate["differences"]) > 0
    first = certificate["differences"][0]
    assert (first["label"], first["drafter"], first["target"]) == ("bug", "lookup", "llama")
    assert first["vanilla"] != first["found"]
    monkeypatch.undo()
    # the report has all that makes the difference again
    engine, seeds = Engine(run.target("llama", "cpu"), PromptLookup(1, 4)), [first["seed"]]
    (text,) = engine.generate([first["prompt"]], first["max_new_tokens"], seeds=seeds)
    assert text.tokens[first["position"]] == first["vanilla"][0]
