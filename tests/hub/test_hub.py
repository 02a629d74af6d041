"""Adapters to the hub: what is sent, what is refused, and what the card says."""

import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import yaml
from commands import ROOT
from helpers import adapter_for, saved_adapter, tiny_target
from huggingface_hub.errors import HfHubHTTPError, HTTPError

import kangaroo
from kangaroo.cli import commands as cli
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import CONFIG, WEIGHTS
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.hub.transfer import FILES, PushConfig, card, check, push
from kangaroo.utils.errors import ConfigError, CorruptFile, HubError

# the library under the client, which has had two names
httpx = import_module(HTTPError.__module__.partition(".")[0])
REFUSAL = httpx.Response(401, request=httpx.Request("POST", "https://hub"))
SHIPPED = sorted(path.parent for path in ROOT.glob(f"adapters/*/{WEIGHTS}"))
REPO = "someone/an-adapter"
PUSHED = PushConfig("", REPO, "")
TRAINING = {
    "command": "train.py model=tiny",
    "progress": {"assistant_tokens": 7, "held_out": {"agreement": 0.5, "step2/loss": 1.0}},
    "hardware": {"cpu": "x86_64", "cuda": None},
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands in for the hub's client: remembers what it is asked; `files` are those it has."""
    hub = MagicMock(files={})

    def upload_folder(repo_id, folder_path, **options):
        files = (file for file in folder_path.rglob("*") if file.is_file())
        hub.files = {f.relative_to(folder_path).as_posix(): f.read_bytes() for f in files}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    hub.upload_folder.side_effect = upload_folder
    monkeypatch.setattr("kangaroo.hub.transfer.HfApi", lambda: hub)
    monkeypatch.chdir(tmp_path)
    return hub


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


def pushing(adapter, **changes):
    return replace(PushConfig(str(adapter), REPO, "out"), **changes)


def test_an_adapter_goes_to_the_hub_whole_in_one_commit(hub, adapter):
    assert push(pushing(adapter)) == f"https://hub/{REPO}/commit/1"
    created, (_, _, uploaded) = hub.mock_calls
    assert created == call.create_repo(REPO, private=False, exist_ok=True)
    assert uploaded["revision"] is None and "notes.txt" not in hub.files
    assert all(hub.files[name] == (adapter / name).read_bytes() for name in FILES)
    hub.reset_mock()
    push(pushing(adapter, revision="trial", private=True))
    *before, (name, _, uploaded) = hub.mock_calls
    branch = call.create_branch(REPO, branch="trial", exist_ok=True)
    assert before == [call.create_repo(REPO, private=True, exist_ok=True), branch]
    assert (name, uploaded["revision"]) == ("upload_folder", "trial")


def test_the_cards_example_answers_as_the_adapter_in_its_folder_does(hub, adapter, capsys):
    push(pushing(adapter))
    text = hub.files["README.md"].decode()
    code, in_transformers = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    names: dict = {}
    code = code.replace("max_new_tokens=128", "max_new_tokens=24")
    exec(compile(code.replace(REPO, "out"), "README.md", "exec"), names)  # which was uploaded
    assert names["model"].engine.drafter.exit_layer == 2
    local = kangaroo.load("tiny", adapter=str(adapter))
    expected = local.generate("Why is the sky blue?", max_new_tokens=24)
    assert capsys.readouterr().out == f"{expected}\n"
    options = f'custom_generate="{REPO}", trust_remote_code=True'
    assert in_transformers == f"model.generate(**inputs, {options})\n"


def test_a_dry_run_writes_what_would_be_sent_and_asks_nothing(hub, adapter, monkeypatch, capsys):
    words = ["source=made", f"repo={REPO}", "output=out", "dry_run=true"]
    monkeypatch.setattr("sys.argv", ["scripts/convert.py push", *words])
    cli.convert_push()
    assert f"out holds what would be uploaded to {REPO}: README.md" in capsys.readouterr().out
    code = {f"custom_generate/{name}" for name in ("generate.py", "requirements.txt")}
    expected = {*FILES, "README.md", *code}
    files = (file for file in Path("out").rglob("*") if file.is_file())
    assert {file.relative_to("out").as_posix() for file in files} == expected
    assert hub.mock_calls == []
    push(pushing(adapter))  # over what the dry run left
    assert hub.files.keys() == expected


def test_a_folder_with_other_files_is_not_cleared(hub, adapter):
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"output='out' holds thesis\.tex"):
        push(pushing(adapter))
    (adapter / "notes.txt").unlink()
    with pytest.raises(ConfigError, match="is the adapter's own folder"):
        push(pushing(adapter, output=str(adapter)))
    assert Path("out/thesis.tex").exists() and (adapter / WEIGHTS).exists()


def test_an_adapter_that_cannot_be_used_is_not_sent(hub, adapter, lm):
    about = json.loads((adapter / CONFIG).read_text()) | {"vocabulary": 4}
    (adapter / CONFIG).write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="must lie in 1 to 3"):
        push(pushing(adapter))
    saved_adapter(lm, EagleHead(lm), Path("larger"))
    shutil.copy(f"larger/{WEIGHTS}", adapter)
    with pytest.raises(CorruptFile, match=r"holds \d+ weights, and config.json says \d+"):
        push(pushing(adapter))
    assert hub.mock_calls == [] and not Path("out").exists()


@pytest.mark.parametrize("name", ["mine", "a/b/c", "someone/x.git", ""])
def test_a_name_that_the_hub_would_refuse_is_refused_before_anything_is_done(hub, adapter, name):
    with pytest.raises(ConfigError, match=f"repo='{re.escape(name)}' is no name of a repo"):
        push(pushing(adapter, repo=name))
    with pytest.raises(ConfigError, match="base_model="):
        push(pushing(adapter, base_model=name))
    assert hub.mock_calls == [] and not Path("out").exists()


def test_what_the_hub_says_of_a_failure_is_told(hub, adapter):
    for error, message in (
        (ValueError('"x" must be\none of'), 'refused what was sent.*"x" must be one of'),
        (HfHubHTTPError("no", response=REFUSAL), "the hub refused. .*hf auth login"),
        (httpx.ConnectError("nobody listens"), r"the hub cannot be reached.*\(nobody listens\)"),
    ):
        hub.upload_folder.side_effect = error
        with pytest.raises(HubError, match=f"'{REPO}' was not uploaded: .*{message}"):
            push(pushing(adapter))


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_a_variable_is_to_be_unset_only_where_it_is_set(hub, adapter, variable, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", variable is not None)
    if variable:
        monkeypatch.setenv(variable, "1")
    hub.upload_folder.side_effect = httpx.ConnectError("nobody listens")
    fix = f"Unset {variable}" if variable else "Go online"
    with pytest.raises(HubError, match=rf"the hub cannot be reached\. {fix}\. \(nobody"):
        push(pushing(adapter))


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_the_card_of_a_shipped_adapter_says_what_its_config_says(folder):
    config = check(folder)
    pushed = PushConfig("", "someone/x", "", base_model="user/target", license="apache-2.0")
    text = card(config, pushed)
    tags = ["kangaroo", "speculative-decoding", "custom_generate", config.architecture.drafter]
    target = {"base_model": "user/target", "base_model_relation": "adapter"}
    about = {"library_name": "kangaroo", "tags": list(dict.fromkeys(tags)), "license": "apache-2.0"}
    assert front_matter(text) == about | target
    progress = config.training["progress"]
    for part in (
        f"{config.parameters:,}",
        f"after {config.exit_layer} of {config.n_layers} layers",
        config.training["command"],
        f"| conversations | {config.training['data']['conversations']} |",
        f"| optimizer steps | {progress['step']} |",
        f"{progress['held_out']['agreement']:.3f}",
        config.training["data"]["fingerprint"],
        config.training["git_revision"],
        "a 4-bit file (Q4_1 layers, Q8_0 embeddings), widened to bfloat16",
    ):
        assert part in text
    assert 'kangaroo.load("smollm2-135m", ' in text and "model=smollm2-135m" in text
    assert "None" not in text and "step2/loss" not in text


def test_a_card_claims_nothing_that_the_config_does_not_say_and_tells_no_local_path(lm):
    about = adapter_files.describe(lm, adapter_for(lm), {})
    text = card(about, PUSHED)
    assert set(front_matter(text)) == {"library_name", "tags"}
    for heading in ("## Results", "## How it was trained", "None", "| loss", "4-bit"):
        assert heading not in text
    imported = card(replace(about, training={"imported": {"source": "x"}}), PUSHED)
    assert "## Where it comes from" in imported and "| imported from | source=x |" in imported
    on_hub = card(replace(about, target="lmsys/vicuna-7b-v1.3"), PUSHED)
    assert front_matter(on_hub)["base_model"] == "lmsys/vicuna-7b-v1.3"
    assert 'kangaroo.load("vicuna-7b", ' in on_hub and "model=vicuna-7b" in on_hub
    for folder in ("/home/me/secret/llama", "llama"):
        local = card(replace(about, target=folder), PUSHED)
        assert "secret" not in local and "base_model" not in local and "`llama`" in local
    pushed = replace(PUSHED, base_model="org/model")
    named = card(replace(about, target="/home/me/llama"), pushed)
    assert 'kangaroo.load("org/model", ' in named and "model=org/model" in named
