"""Methods side by side, from summaries of records written by hand."""

import io
import json
import re

import pytest
from evaluation_records import ABOUT, SETTINGS, record, run, vanilla_run
from rich.console import Console

from kangaroo.evaluation import comparison, conclusion, summary
from kangaroo.evaluation.metrics import Place
from kangaroo.evaluation.records import Fork, Run
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import fitting, named_by
from kangaroo.utils.tables import short

TASKS = ["qa", "rag", "math_reasoning", "translation", "summarization", "writing"]
HF = Run(list(range(8)), "text", "length", 8, 12.0, [], [], [], [], [], [])


def finish(folder, name, seconds=1.0, fork=None, drafts=True, cost=None, tasks=TASKS, **settings):
    """A job whose rounds took so long; vanilla took 9 seconds for each question, hf 12."""
    records = []
    for i, task in enumerate([*tasks, *tasks]):
        emitted = [4, 4] if drafts else [1] * 8
        accepted = [3, 3] if drafts else [0] * 8
        drafted = [5, 5] if drafts else [0] * 8
        method = run(emitted, accepted, drafted, [seconds + i / 50] * len(emitted))
        some = record(i, (method, vanilla_run(8)), category=task, fork=fork if i == 0 else None)
        some.turns[0].runs["hf"] = HF
        some.drafter_bytes = 1_250_000
        records.append(some)
    about = ABOUT | {"settings": SETTINGS | {"drafter": name} | settings}
    if cost is not None:
        about |= {"drafter_cost": cost}
    (folder / name).mkdir()
    text = json.dumps(summary.summarise(records, about))
    (folder / name / "summary.json").write_text(text)


FREE = {"parameters": 0, "training": {}}


@pytest.fixture
def sweep(tmp_path):
    """Three methods, and a job that was stopped."""
    finish(tmp_path, "vanilla", drafts=False, cost=FREE)
    finish(tmp_path, "kangaroo,threshold=0.4")
    finish(tmp_path, "medusa", 2.0, fork=Fork(3, 7.0, "bug"))
    (tmp_path / "lookahead").mkdir()
    (tmp_path / "lookahead/run.json").write_text("{}")
    return tmp_path


def test_the_fastest_comes_first_and_what_is_not_finished_nowhere(sweep):
    found = comparison.compare(sweep)
    names = [method["name"] for method in found["methods"]]
    assert names == ["kangaroo,threshold=0.4", "medusa", "vanilla"]


def test_a_folder_without_a_finished_job_compares_nothing(tmp_path):
    assert comparison.compare(tmp_path) is None


def test_the_table_holds_each_methods_metrics_and_costs(sweep):
    kangaroo, medusa, vanilla = comparison.methods(comparison.compare(sweep), Place.methods)
    assert kangaroo == {
        "method": "kangaroo,threshold=0.4",
        "speedup": "2.80",
        "95%": kangaroo["95%"],
        "decoding": "3.60",
        "vs hf": "3.73",
        "95% vs hf": kangaroo["95% vs hf"],
        "CR": "4.00",
        "CTAR(1)": "1.00",
        "CTAR(2)": "1.00",
        "CTAR(3)": "1.00",
        "accepted": "60%",
        "tokens/s": "2.5",
        "params": "10",
        "memory": "1.25MB",
        "lossless": "12/12",
        "training": "trained positions: 1.2k, epochs: 2",
    }
    low, high = map(float, kangaroo["95%"].split("-"))
    assert low < 12 * 9 / (12 * 3 + 2 * 66 / 50) < high
    assert medusa["lossless"] == "12/12, bugs: 1"
    # it drafts nothing, so accepts nothing
    assert [vanilla[name] for name in ("CR", "CTAR(1)", "CTAR(3)", "accepted")] == ["1.00", *"---"]
    assert vanilla["training"] == "none"


def test_what_was_never_accepted_has_a_ctar_of_zero():
    results = {"acceptance_rate": 0.5, "ctar": [0.75, 0.5]}
    assert comparison.ctars(results) == {"CTAR(1)": "0.75", "CTAR(2)": "0.50", "CTAR(3)": "0.00"}


@pytest.mark.parametrize(
    "name, value", [("max_new_tokens", 9), ("bench.fingerprint", "x"), ("model.path", "y")]
)
def test_jobs_that_were_asked_differently_are_not_compared(sweep, name, value):
    finish(sweep, "rest", **{name: value})
    fix = rf"'rest' and 'kangaroo,threshold=0.4' in .* other settings: {name}=.*{value}.* now"
    with pytest.raises(ConfigError, match=fix):
        comparison.compare(sweep)


def test_settings_of_the_drafter_may_differ(sweep):
    finish(sweep, "kangaroo", **{"drafter.steps": 4})
    assert comparison.compare(sweep)["methods"][0]["settings"]["drafter.steps"] == 4


def test_the_files_tell_every_method_under_every_task(sweep):
    found = comparison.compare(sweep)
    comparison.write(found, sweep)
    assert json.loads((sweep / "comparison.json").read_text()) == found
    text = (sweep / "report.md").read_text()
    assert text.count("| kangaroo,threshold=0.4 |") == 5
    assert "| method | qa | rag | math_reasoning |" in text
    assert "12 questions, 12 turns, at most 8 new tokens, greedy" in text
    for image in re.findall(r"\((\w+\.png)\)", text):
        assert (sweep / image).read_bytes().startswith(b"\x89PNG")
    assert comparison.compare(sweep) == found  # it does not read what it wrote


def test_a_comparison_stands_without_baselines_and_with_a_single_question(tmp_path):
    some = record(1, (run([4], [3], [3], [1.0]), None))
    about = ABOUT | {"settings": SETTINGS | {"baselines": []}}
    (tmp_path / "kangaroo").mkdir()
    text = json.dumps(summary.summarise([some], about))
    (tmp_path / "kangaroo/summary.json").write_text(text)
    found = comparison.compare(tmp_path)
    comparison.write(found, tmp_path)
    (row,) = comparison.methods(found, Place.methods)
    assert {row[name] for name in ("speedup", "95%", "vs hf", "95% vs hf")} == {"-"}


def test_the_terminals_table_fits_80_columns(sweep):
    finish(sweep, "kangaroo,adapter=adapters-smollm2-135m-fused,steps=4,threshold=0.4", 0.01)
    found = comparison.compare(sweep)
    for method in found["methods"]:
        method["overall"] |= {"speedup": 12.5, "decoding_speedup": 12.5, "hf_speedup": 12.5}
    text = io.StringIO()
    Console(width=80, file=text).print(comparison.terminal_table(found))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "…" not in text.getvalue()
    whole = "speedup: of the whole time, prompts included; decoding: from the first token on."
    assert whole in " ".join(text.getvalue().split())


@pytest.mark.parametrize(
    "names, common, shown",
    [
        (
            ["kangaroo,threshold=0.4", "kangaroo,threshold=0.6"],
            "kangaroo",
            ["threshold=0.4", "threshold=0.6"],
        ),
        (
            ["k,a=x,b=1,c=1", "k,a=x,b=1,c=2", "k,a=x,b=2,c=1"],
            "k,a=x",
            ["b=1 c=1", "b=1 c=2", "b=2 c=1"],
        ),
        (["k,a=x,b=1", "k,a=x,b=2", "vanilla"], "", ["k b=1", "k b=2", "vanilla"]),
        (["k,exit=[1,2]", "k,exit=[3]"], "k", ["exit=[1,2]", "exit=[3]"]),
        (["k", "k,b=1"], "", ["k", "k b=1"]),
        (["k,b=1"], "", ["k"]),
    ],
)
def test_the_terminal_shows_what_differs(names, common, shown):
    assert comparison.labels(names) == (common, shown)


def test_a_sweeps_table_has_a_line_for_each_setting(tmp_path):
    for value in (0.2, 0.4):
        finish(tmp_path, f"kangaroo,adapter=adapters-mine-of-long-ago,threshold={value}", value)
    text = io.StringIO()
    Console(width=80, file=text).print(comparison.terminal_table(comparison.compare(tmp_path)))
    title, *lines = text.getvalue().splitlines()
    assert "on b: kangaroo,adapter=adapters-mine-of-long-ago compared" in title
    assert [line.split()[0] for line in lines[3:5]] == ["threshold=0.2", "threshold=0.4"]


def test_a_comparison_ends_with_the_winner_and_a_sentence_to_cite(sweep):
    finish(sweep, "hybrid", 1.001)
    found = comparison.compare(sweep)
    first, last = conclusion.sentences(found)
    name = "kangaroo,threshold=0.4"
    assert first == (
        f"{name} is the fastest drafter and, on these questions, differs from all others."
    )
    low, high = found["methods"][0]["overall"]["speedup_ci95"]
    assert last == (
        f"To cite: {name} is 2.80 times as fast as vanilla decoding (95% interval {low:.2f} to "
        f"{high:.2f}) with m on b (12 questions, 12 turns, at most 8 new tokens, greedy, batch 1, "
        "float32 on cpu; x, CPU threads: 1; Kangaroo abc)."
    )
    text = io.StringIO()
    comparison.show(found, Console(width=80, file=text))
    for place in (comparison.markdown(found), text.getvalue()):
        assert first in place and last in place


@pytest.mark.parametrize(
    "seconds, told",
    [
        (
            {"a": 1.0, "b": 1.0},
            "a is the fastest drafter and, on these questions, does not differ from b.",
        ),
        (
            {"a": 9.0, "vanilla": 4.0},
            "a is the fastest drafter and, on these questions, differs from all others, but "
            "vanilla is faster.",
        ),
    ],
)
def test_the_winner_is_named_with_what_it_does_not_differ_from(seconds, told, tmp_path):
    for name, value in seconds.items():
        finish(tmp_path, name, value)
    assert conclusion.sentences(comparison.compare(tmp_path))[0] == told


def test_names_of_drafters_are_not_folded_in_the_terminal(tmp_path):
    names = ["kangaroo", "prompt_lookup", "transformers", "vanilla"]
    for name in names:
        finish(tmp_path, name)
    found, text = comparison.compare(tmp_path), io.StringIO()
    for method in found["methods"]:
        method["overall"] |= {"speedup": 1.25, "hf_speedup": 12.5, "tokens_per_second": 123.4}
        method["lossless"] |= {"turns": 82, "identical": 82}
    Console(width=80, file=text).print(comparison.terminal_table(found))
    assert all(f"{name} " in text.getvalue() for name in names)


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (66, "66"), (999, "999"), (1000, "1k"), (885_888, "886k"), (1_267_359, "1.27M")],
)
def test_numbers_are_shortened_to_three_digits(value, text):
    assert short(value) == text


def test_a_jobs_folder_is_named_by_the_drafters_settings_and_the_sweeps_by_the_others():
    asked = ["model=tiny", "drafter=kangaroo", "seed=3", "drafter.threshold=0.4", "bench=demo"]
    asked += ["drafter.adapter=adapters/x", "+sampling.top_p=0.9", "logger=wandb"]
    excluded = ["model", "drafter", "bench", "logger"]
    assert named_by(asked, excluded, "drafter") == ",adapter=adapters-x,threshold=0.4"
    assert named_by(asked, excluded, "others") == ",sampling.top_p=0.9,seed=3"
    assert named_by(asked[::-1], excluded, "others") == ",sampling.top_p=0.9,seed=3"
    assert named_by([], excluded, "drafter") == ""


def test_only_names_that_are_too_long_are_shortened():
    assert fitting("outputs/threshold=0.4,steps=6") == "outputs/threshold=0.4,steps=6"
    long, other = "a" * 190 + "é" * 20, "a" * 190 + "é" * 19 + "b"
    first, second = fitting(f"{long}/{long}").split("/")
    assert first == second and first.startswith("a" * 180) and first != fitting(other)
    assert len(first.encode()) <= 200
