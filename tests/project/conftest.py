"""Where the commands of pages and messages are typed."""

import json
import shutil

import pytest
import torch
from commands import questions, talks
from helpers import adapter_for, saved_adapter, tiny_target
from stand_ins import BRIEF, ONE, SHORT, typed

from kangaroo.heads import official
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Where a user might stand: an adapter, heads, questions and conversations lie there."""
    here, lm = tmp_path_factory.mktemp("begun"), tiny_target()
    training = {"progress": {"assistant_tokens": 7}}
    for name, fused in ("tiny", False), ("tiny-fused", True):
        adapter = adapter_for(lm, architecture=AdapterHeadConfig(fused=fused))
        saved_adapter(lm, adapter, here / "adapters" / name, training=training)
    heads = MedusaHeads(lm, MedusaHeadsConfig(heads=2)).start_from(lm)
    facts = {"guesses": [[0.5, 0.2]] * 2}
    saved_adapter(lm, heads, here / "adapters/tiny-medusa", facts=facts)
    saved_adapter(lm, EagleHead(lm), here / "adapters/tiny-eagle")
    (here / "ShareGPT.json").write_text(json.dumps(talks()))
    (here / "questions.jsonl").write_text("\n".join(map(json.dumps, questions())) + "\n")
    return here


@pytest.fixture
def here(begun, tmp_path):
    """A copy of that, to be changed."""
    return shutil.copytree(begun, tmp_path / "here")


@pytest.fixture(scope="module")
def made(begun, tmp_path_factory):
    """And what earlier commands left: data, a datastore, a subset of layers; a checkpoint."""
    here = shutil.copytree(begun, tmp_path_factory.mktemp("made") / "here")
    for data in ("self_synthesis", "tasks"):
        typed("scripts/make_data.py", f"model=tiny data={data} {SHORT} {ONE} {BRIEF}", here)
    typed("scripts/prepare.py datastore", f"model=tiny {SHORT}", here)
    options = "model=tiny search.budget=4 search.conversations=2"
    typed("scripts/prepare.py layers", f"{options} {SHORT}", here)
    lm, checkpoint = tiny_target(), here / "kangaroo-tiny-v1.3"  # of the authors' code
    state = adapter_for(lm).state_dict()
    checkpoint.mkdir()
    named = {name: state[ours] for name, ours in official.NAMES.items()}
    torch.save(named, checkpoint / official.WEIGHTS)
    lm.config.to_json_file(checkpoint / official.CONFIG)
    return here
