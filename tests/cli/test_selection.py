"""`model=` takes what `kangaroo.load` takes, in every command, and names it by its last part."""

import pytest
from commands import python as run
from composing import composed, of_command

from kangaroo import __main__
from kangaroo.cli.schema import select_models
from kangaroo.models.loading import load, model_config
from kangaroo.models.random_models import TINY, byte_tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.training.recipe import paper_exit
from kangaroo.utils.errors import ConfigError

OTHERS = ("convert pack", "prepare split")  # which load no model
COMMANDS = [name for name in __main__.COMMANDS if name not in OTHERS]
FOLDERS = ["Some-7B", "odd (näme), 2=x", "500"]
PATHS = ["someone/Some-7B", "./Some-7B", "Some-7B/", *(f"{{}}/{x}" for x in FOLDERS), *FOLDERS]

ODDEST = "{}/" + FOLDERS[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_is_a_choice_of_every_command_called_by_its_last_part(command, here):
    """Of one command in every form, of the others in the oddest."""
    forms = [("model", ODDEST)]
    if command == "serve":
        forms += [("model.path", ODDEST), *(("model", path) for path in PATHS)]
    for option, form in forms:
        path = form.format(here)
        config = of_command(command, select_models([f"{option}={path}"])).model
        assert (config.name, config.path) == (model_config(path).name, path)
        assert config.name == path.rstrip("/").rpartition("/")[2]


def test_known_models_are_known_by_their_ids_too():
    assert select_models(["model=lmsys/vicuna-7b-v1.3"]) == ["model=vicuna-7b"]
    assert select_models([f"model.path={TINY}"]) == ["model=tiny"]
    assert select_models(["model=mine", "-m"]) == ["model=mine", "-m"]  # perhaps of a --config-dir


def test_a_known_model_from_another_folder_keeps_its_settings():
    words = ["model=vicuna-7b", "model.path=/my/folder"]
    assert select_models(words) == words
    own = composed("serve", *select_models(["model.path=/my/vicuna", "model.name=mine"])).model
    assert (own.name, own.path, own.chat_template) == ("mine", "/my/vicuna", None)


def test_a_sweep_tries_several_models_of_different_names(here):
    words = select_models(["-m", "model=tiny,someone/Some-7B,500"])
    assert words == ["-m", 'model=tiny,Some-7B,"500"']
    assert composed("evaluate", "model=Some-7B").model.path == "someone/Some-7B"
    with pytest.raises(ConfigError, match=r"'a/x' and 'b/x' are both called 'x'.*model.name="):
        select_models(["-m", "model=a/x,b/x"])
    assert select_models(["model="]) == ["model="]
    with pytest.raises(ConfigError, match=r"no model 'nothing'. Pass a hub id, a local folder"):
        select_models(["model.path=nothing"])


def test_the_papers_rule_gives_the_papers_exits_and_keeps_to_its_bounds(monkeypatch):
    lm = TargetModel(load(model_config("tiny"))[0])
    for layers in range(1, 200):
        monkeypatch.setattr(TargetModel, "n_layers", layers)
        within = [exit for exit in range(1, layers + 1) if layers / 16 <= exit <= layers / 10]
        assert paper_exit(lm) in (within or range(1, layers + 1))
        assert paper_exit(lm) == {32: 2, 40: 3, 60: 5}.get(layers, paper_exit(lm))


def test_results_and_advice_have_the_models_name_and_the_command_as_typed(here):
    model, _ = load(model_config("tiny"))
    for files in model, byte_tokenizer():
        files.save_pretrained(here / "Some-7B")
    few = "bench=demo question_end=1 max_new_tokens=6 warmup=0 model.dtype=float32"
    done = run("evaluate.py", f"model={here}/Some-7B", *few.split(), cwd=here)
    assert done.returncode == 0, done.stderr
    assert "Some-7B on demo" in done.stdout and "smollm2" not in done.stdout
    (record,) = (here / "outputs/evaluate/Some-7B").rglob("run.json")
    assert f"evaluate.py model={here}/Some-7B bench=demo" in record.read_text()
    assert done.stdout.count("drafter=hybrid drafts from the text alone: no adapter at") == 1
    few = "estimate=true trainer.epochs=1 trainer.batch_tokens=256".split()
    told = run("train.py", "model=Some-7B", *few, cwd=here).stdout
    assert "exit layer 1 of 6, by the paper's rule (1/16 to 1/10 of the layers)" in told
