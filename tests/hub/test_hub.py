"""Adapters for the hub: what is written, what is refused, and what the card says."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import ROOT
from helpers import adapter_for, saved_adapter, tiny_target

import kangaroo
from kangaroo.cli import commands as cli
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import CONFIG, WEIGHTS
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.hub.transfer import FILES, PackConfig, card, check, pack
from kangaroo.models.loading import known_models
from kangaroo.utils.errors import ConfigError, CorruptFile

SHIPPED = sorted(path.parent for path in ROOT.glob(f"adapters/*/{WEIGHTS}"))
REPO = "someone/an-adapter"
PACKED = PackConfig("", REPO, "")
TRAINING = {
    "command": "train.py model=tiny",
    "progress": {"assistant_tokens": 7, "held_out": {"agreement": 0.5, "step2/loss": 1.0}},
    "hardware": {"cpu": "x86_64", "cuda": None},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def lm():
    return tiny_target()


@pytest.fixture
def adapter(lm, tmp_path):
    """A folder such as training leaves, and a file that does not belong to it."""
    folder = tmp_path / "made"
    saved_adapter(lm, adapter_for(lm), folder, (5, 9, 3), TRAINING, vocabulary=2)
    (folder / "notes.txt").write_text("mine")
    return folder


def packing(adapter, **changes):
    return replace(PackConfig(str(adapter), REPO, "out"), **changes)


def test_the_cards_example_answers_as_the_adapter_in_its_folder_does(adapter, capsys):
    pack(packing(adapter))
    text = Path("out/README.md").read_text()
    code, in_transformers = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    names: dict = {}
    code = code.replace("max_new_tokens=128", "max_new_tokens=24")
    exec(compile(code.replace(REPO, "out"), "README.md", "exec"), names)
    assert names["model"].engine.drafter.exit_layer == 2
    local = kangaroo.load("tiny", adapter=str(adapter))
    expected = local.generate("Why is the sky blue?", max_new_tokens=24)
    assert capsys.readouterr().out == f"{expected}\n"
    options = f'custom_generate="{REPO}", trust_remote_code=True'
    assert in_transformers == f"model.generate(**inputs, {options})\n"


def test_a_folder_holds_the_adapter_whole_its_card_and_its_code(adapter, monkeypatch, capsys):
    words = ["source=made", f"repo={REPO}", "output=out"]
    code = {f"custom_generate/{name}" for name in ("generate.py", "requirements.txt")}
    for _ in range(2):  # over what the first left
        monkeypatch.setattr("sys.argv", ["scripts/convert.py pack", *words])
        cli.convert_pack()
        assert f"upload it: hf upload {REPO} out" in capsys.readouterr().out
        files = (file for file in Path("out").rglob("*") if file.is_file())
        found = {file.relative_to("out").as_posix() for file in files}
        assert found == {*FILES, "README.md", *code}
    for name in FILES:
        assert Path("out", name).read_bytes() == (adapter / name).read_bytes()


def test_a_folder_with_other_files_is_not_cleared(adapter):
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"output='out' holds thesis\.tex"):
        pack(packing(adapter))
    (adapter / "notes.txt").unlink()
    with pytest.raises(ConfigError, match="is the adapter's own folder"):
        pack(packing(adapter, output=str(adapter)))
    assert Path("out/thesis.tex").exists() and (adapter / WEIGHTS).exists()


def test_an_adapter_that_cannot_be_used_is_not_sent(adapter, lm):
    about = json.loads((adapter / CONFIG).read_text()) | {"vocabulary": 4}
    (adapter / CONFIG).write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="must lie in 1 to 3"):
        pack(packing(adapter))
    saved_adapter(lm, EagleHead(lm), Path("larger"))
    shutil.copy(f"larger/{WEIGHTS}", adapter)
    with pytest.raises(CorruptFile, match=r"holds \d+ weights, and config.json says \d+"):
        pack(packing(adapter))
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["mine", "a/b/c", "someone/x.git", ""])
def test_a_name_that_the_hub_would_refuse_is_refused_before_anything_is_done(adapter, name):
    with pytest.raises(ConfigError, match=f"repo='{re.escape(name)}' is no name of a repo"):
        pack(packing(adapter, repo=name))
    with pytest.raises(ConfigError, match="base_model="):
        pack(packing(adapter, base_model=name))
    assert not Path("out").exists()


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_the_card_of_a_shipped_adapter_says_what_its_config_says(folder):
    config = check(folder)
    packed = PackConfig("", "someone/x", "", base_model="user/target", license="apache-2.0")
    text = card(config, packed)
    tags = ["kangaroo", "speculative-decoding", "custom_generate", config.architecture.drafter]
    target = {"base_model": "user/target", "base_model_relation": "adapter"}
    about = {"library_name": "kangaroo", "tags": list(dict.fromkeys(tags)), "license": "apache-2.0"}
    assert front_matter(text) == about | target
    progress = config.training["progress"]
    assert f"after {config.exit_layer} of {config.n_layers} layers" in text
    assert f"{config.parameters:,}" in text and config.training["command"] in text
    assert f"| conversations | {config.training['data']['conversations']} |" in text
    assert f"{progress['held_out']['agreement']:.3f}" in text
    assert config.training["data"]["fingerprint"] in text
    assert config.training["git_revision"] in text
    name = next(x["name"] for x in known_models() if x["path"] == config.target)
    assert f'kangaroo.load("{name}", ' in text and f"model={name}" in text
    widened = "a 4-bit file (Q4_1 layers, Q8_0 embeddings), widened to bfloat16"
    assert (widened in text) == (name == "smollm2-135m")
    assert "None" not in text and "step2/loss" not in text


def test_a_card_claims_nothing_that_the_config_does_not_say_and_tells_no_local_path(lm):
    about = adapter_files.describe(lm, adapter_for(lm), {})
    text = card(about, PACKED)
    assert set(front_matter(text)) == {"library_name", "tags"}
    for heading in ("## Results", "## How it was trained", "None", "| loss", "4-bit"):
        assert heading not in text
    imported = card(replace(about, training={"imported": {"source": "x"}}), PACKED)
    assert "## Where it comes from" in imported and "| imported from | source=x |" in imported
    on_hub = card(replace(about, target="lmsys/vicuna-7b-v1.3"), PACKED)
    assert front_matter(on_hub)["base_model"] == "lmsys/vicuna-7b-v1.3"
    assert 'kangaroo.load("vicuna-7b", ' in on_hub and "model=vicuna-7b" in on_hub
    for folder in ("/home/me/secret/llama", "llama"):
        local = card(replace(about, target=folder), PACKED)
        assert "secret" not in local and "base_model" not in local and "`llama`" in local
    packed = replace(PACKED, base_model="org/model")
    named = card(replace(about, target="/home/me/llama"), packed)
    assert 'kangaroo.load("org/model", ' in named and "model=org/model" in named
