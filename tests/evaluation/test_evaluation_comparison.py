"""Methods side by side, by input length and in pairs, from records by hand."""

import json

import numpy as np
import pytest
from commands import ROOT
from evaluation_cases import COST, finish, hf_run, record, run, shown, vanilla_run
from rich.console import Console

from kangaroo.evaluation import comparison
from kangaroo.evaluation.metrics import estimate, pairs
from kangaroo.evaluation.records import Fork
from kangaroo.evaluation.summary import by_length
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError

TASKS = ["qa", "rag", "math_reasoning", "translation", "summarization", "writing"]
FASTEST = "a is the fastest drafter and, on these questions,"
HEADINGS = {"Speedup over vanilla": "speedup", "Compression rate": "compression_rate"}
HEADINGS |= {"Acceptance length": "mean_acceptance_length"}
HEADINGS |= {f"CTAR({w})": f"ctar{w}" for w in (1, 2, 3)}


def job(folder, name, seconds=1.0, fork=None, drafts=True, cost=COST, **settings):
    """A job whose rounds took so long; vanilla took 9 seconds for each question, hf 12."""
    records = []
    for i, task in enumerate([*TASKS, *TASKS]):
        rounds = ([4, 4], [3, 3], [5, 5]) if drafts else ([1] * 8, [0] * 8, [0] * 8)
        method = run(*rounds, [seconds + i / 50] * len(rounds[0]))
        some = record(i, (method, vanilla_run(8)), category=task, fork=fork if i == 0 else None)
        some.turns[0].runs["hf"] = hf_run(8, 12.0)
        some.drafter_bytes = 1_250_000
        records.append(some)
    finish(folder / name, records, cost, **settings)


@pytest.fixture
def sweep(tmp_path):
    job(tmp_path, "vanilla", drafts=False, cost={"parameters": 0, "training": {}})
    job(tmp_path, "kangaroo,threshold=0.4", **{"drafter.steps": 4})  # these may differ
    job(tmp_path, "medusa", 2.0, fork=Fork(3, 7.0, "bug"))
    (tmp_path / "lookahead").mkdir()
    (tmp_path / "lookahead/run.json").write_text("{}")
    return tmp_path


def test_the_table_holds_each_finished_methods_metrics_and_costs_the_fastest_first(sweep):
    kangaroo, medusa, vanilla = comparison.rows_of(comparison.compare(sweep)["methods"])
    named = {"method": "kangaroo,threshold=0.4", "lossless": "12/12"}
    speeds = {"speedup": "2.80", "decoding": "3.60", "vs hf": "3.73", "tokens/s": "2.5"}
    intervals = {name: kangaroo[name] for name in ("95%", "95% vs hf")}
    drafts = {"CR": "4.00", "accepted": "60%"} | {f"CTAR({w})": "1.00" for w in (1, 2, 3)}
    costs = {"params": "10", "memory": "1.25MB", "training": "trained positions: 1.2k, epochs: 2"}
    assert kangaroo == named | speeds | intervals | drafts | costs
    low, high = map(float, kangaroo["95%"].split("-"))
    assert low < 12 * 9 / (12 * 3 + 2 * 66 / 50) < high
    assert (medusa["method"], medusa["lossless"]) == ("medusa", "12/12, bugs: 1")
    # it drafts nothing, so accepts nothing
    names = ("method", "CR", "CTAR(1)", "CTAR(3)", "accepted", "training")
    assert [vanilla[name] for name in names] == ["vanilla", "1.00", *"---", "none"]


def test_jobs_that_were_asked_differently_are_not_compared(sweep):
    job(sweep, "rest", **{"bench.fingerprint": "x"})
    fix = r"'rest' and 'kangaroo,threshold=0.4' in .* settings: bench.fingerprint=None there, 'x' n"
    with pytest.raises(ConfigError, match=fix):
        comparison.compare(sweep)


def test_the_files_have_every_method_under_every_task_and_every_pair_once(sweep):
    result = comparison.compare(sweep)
    comparison.write(result, sweep)
    assert json.loads((sweep / "comparison.json").read_text()) == result
    text = (sweep / "report.md").read_text()
    assert text.count("| kangaroo,threshold=0.4 |") == 9
    assert "| method | qa | rag | math_reasoning |" in text
    assert "12 questions, 12 turns, at most 8 new tokens, greedy" in text
    assert (sweep / "speedup.png").read_bytes().startswith(b"\x89PNG")
    pair, *others = result["paired"]
    names = [name.partition(",")[0] for other in others for name in (other["row"], other["column"])]
    assert names == ["kangaroo", "vanilla", "medusa", "vanilla"]
    low, high = pair["speed_ratio_ci95"]
    assert f"| {pair['speed_ratio']:.2f} ({low:.2f}-{high:.2f}) |" in text
    assert comparison.compare(sweep) == result  # it does not read what it wrote
    assert comparison.compare(sweep / "lookahead") is None


def test_a_comparison_stands_without_baselines_and_with_a_single_question(tmp_path):
    method, odd = run([4], [3], [3], [1.0]), "a|b\n[x] $\\frac{$"
    finish(tmp_path / "alone/kangaroo", [record(1, (method, None))], baselines=[])
    finish(tmp_path / "one/kangaroo", [record(1, (method, vanilla_run(4)), category=odd)])
    alone, single = (comparison.compare(tmp_path / name) for name in ("alone", "one"))
    comparison.write(alone, tmp_path)
    (row,) = comparison.rows_of(alone["methods"])
    assert {row[name] for name in ("speedup", "95%", "vs hf", "95% vs hf")} == {"-"}
    comparison.write(single, tmp_path)
    assert r"| method | a\|b [x] $\frac{$ | overall |" in (tmp_path / "report.md").read_text()
    text = shown(single)
    assert "a single question does not show which is." in text
    assert text.count("1 question, 1 turn,") == 1
    unsure = {"row": "kangaroo", "column": "transformers", "speed_ratio_ci95": None}  # few asked it
    overall = {"speedup": 1.4, "speedup_ci95": [1.2, 1.6]}
    methods = [{"name": "kangaroo", "overall": overall}]
    sentence = comparison.conclusion({"methods": methods, "paired": [unsure]})
    assert sentence.endswith("on these questions, differs from all others.")


def test_what_a_user_named_stays_in_a_terminal_as_it_is():
    table = tables.terminal([{"task": "a|b", "[bold]": "[/x] :smile:"}], "on [red]", "by [x]")
    console = Console(record=True)
    console.print(table)
    text = console.export_text()
    assert all(x in text for x in ("[bold]", "[/x] :smile:", "on [red]", "by [x]", "a|b"))


def test_the_terminals_table_fits_80_columns_and_folds_no_drafters_name(tmp_path):
    long = "kangaroo,adapter=adapters-smollm2-135m-fused,steps=4,threshold=0.6"
    names = ["prompt_lookup", "transformers", "vanilla", long]
    for name in names:
        job(tmp_path, name)
    result = comparison.compare(tmp_path)
    for method in result["methods"]:
        method["overall"] |= {"speedup": 12.5, "hf_speedup": 12.5, "tokens_per_second": 123.4}
        method["lossless"] |= {"turns": 82, "identical": 82}
    text = shown(result)
    assert "…" not in text and all(f"{name.split(',')[0]} " in text for name in names)


@pytest.mark.parametrize(
    "seconds, sentence",
    [
        ({"a": 1.0, "vanilla": 1.1}, f"{FASTEST} differs from all others."),
        ({"a": 1.0, "b": 1.0}, f"{FASTEST} does not differ from b."),
        ({"a": 9.0, "vanilla": 4.0}, "questions: a is the fastest, and vanilla is faster."),
    ],
)
def test_one_sentence_names_the_winner_or_says_that_none_pays(seconds, sentence, tmp_path):
    for name, value in seconds.items():
        job(tmp_path, name, value)
    result = comparison.compare(tmp_path)
    said = comparison.conclusion(result)
    assert said.endswith(sentence)
    assert said in comparison.markdown(result) and said in shown(result)


def noted(folder, method, load=0.0, **settings):
    """What is said under the table of a method's and vanilla's answers."""
    records = [record(i, (method, vanilla_run(len(method.tokens)))) for i in range(2)]
    for each in records:
        each.load = load
    finish(folder, records, **{f"drafter.{name}": value for name, value in settings.items()})
    compared = comparison.compare(folder)
    notes = list(comparison.notes(compared))
    text = comparison.markdown(compared)
    assert all(f"- {note}\n" in text and note in shown(compared) for note in notes)
    return " ".join(notes)


def test_a_drafter_that_hardly_drafted_and_a_busy_machine_are_named(tmp_path):
    idle, tried = (run([1] * 20, [0] * 20, [n] + [0] * 19, [1.1] * 20) for n in (0, 1))
    reason = ", since one token costs more than it gains here"
    for i, (method, share) in enumerate(((idle, "0%"), (tried, "5%"))):
        said = noted(tmp_path / f"auto{i}", method, name="clasp", threshold="auto")
        assert said == f"auto{i} drafted in {share} of its rounds{reason}: it is nearly vanilla."
    assert noted(tmp_path / "b", idle, name="rest").startswith("b drafted in 0% of its rounds: ")
    assert noted(tmp_path / "c", idle, name="vanilla") == ""  # as it should
    drafts = run([1, 4], [0, 3], [0, 5], [1.0, 1.0])
    assert noted(tmp_path / "d", drafts, name="clasp", load=1.1) == ""
    busy = "The machine was busy: it had 3.0 processes for each processor."
    assert noted(tmp_path / "e", drafts, name="clasp", load=3.0) == busy


@pytest.mark.parametrize(("seconds", "speedup"), [(1.0, None), (0.72, None), (0.7, "4.29")])
def test_a_speedup_beyond_what_the_rounds_allow_is_named(seconds, speedup, tmp_path):
    """Two rounds write eight tokens, and no round is shorter than vanilla's second."""
    said = noted(tmp_path / "a", run([1, 7], [0, 6], [0, 6], [seconds] * 2, prefill=seconds))
    expected = f"a cannot be {speedup} times as fast with 4.00 tokens a round: no round is shorter"
    assert said.startswith(expected) if speedup else said == ""


@pytest.mark.parametrize(
    ("lossless", "cell"),
    [
        ({"identical": 2, "forks": {}}, "2/2"),
        ({"identical": 0, "forks": {}}, "-"),  # transformers' texts in bfloat16
        ({"identical": 1, "forks": {"near-tie": 1}}, "1/2, near-ties: 1"),
        ({"identical": None, "forks": {}}, "-"),
    ],
)
def test_fewer_equal_texts_than_all_are_never_told_without_the_reason(lossless, cell, tmp_path):
    job(tmp_path, "a")
    (method,) = comparison.compare(tmp_path)["methods"]
    method["lossless"] = {"turns": 2} | lossless
    assert comparison.rows_of([method])[0]["lossless"] == cell


def test_a_committed_page_follows_from_its_results():
    page = ROOT / "docs/results/spec_bench.md"
    result = json.loads(page.with_suffix(".json").read_text())
    assert comparison.markdown(result, "img/spec_bench_speedup.png") == page.read_text()


def test_a_finished_comparison_becomes_a_page_with_its_numbers_and_its_plot(sweep, tmp_path):
    comparison.write(comparison.compare(sweep), sweep)
    page = tmp_path / "docs/my.md"
    comparison.publish(sweep, page)
    report = (sweep / "report.md").read_text()
    assert page.read_text() == report.replace("](speedup.png)", "](img/my_speedup.png)")
    assert (page.parent / "img/my_speedup.png").read_bytes() == (sweep / "speedup.png").read_bytes()
    assert json.loads(page.with_suffix(".json").read_text())["paired"]


def answered(number, category, accepted, length):
    """A question whose prompt has so many tokens; of each round's four so many are accepted."""
    emitted = [n + 1 for n in accepted]
    method = run(emitted, accepted, [4, 4, 4], [1.0, 1.0, 1.0])
    pair = method, vanilla_run(sum(emitted))
    return record(number, pair, category=category, prompts=[length])


def test_each_metric_is_shown_by_category_and_by_input_length(tmp_path):
    groups = [("qa", [4, 3, 3], 1024), ("rag", [3, 1, 2], 1024), ("qa", [3, 2, 2], 2048)]
    records = [answered(i, *group) for i, group in enumerate(groups * 2)]
    finish(tmp_path / "out/mine", records)
    text = comparison.markdown(comparison.compare(tmp_path / "out"))
    by_task = {name: [x for x in records if x.category == name] for name in ("qa", "rag")}
    lengths = {"1k": 1024, "2k": 2048}.items()
    by_length = {k: [x for x in records if x.turns[0].prompt_tokens == n] for k, n in lengths}
    for heading, metric in HEADINGS.items():
        for named, some in (("input length", by_length), ("task", by_task)):
            parts = (some | {"overall": records}).items()
            cells = {k: tables.estimate(*estimate(pairs(part, metric))) for k, part in parts}
            headings, _, row = text.partition(f"## {heading} by {named}\n\n")[2].splitlines()[:3]
            assert headings == f"| method | {' | '.join(cells)} |"
            row = row.replace(", no difference shown", "")
            assert row == f"| mine | {' | '.join(cells.values())} |"
    assert text.count("| method | 1k | 2k | overall |") == len(HEADINGS)


def test_of_a_question_each_turn_counts_where_its_prompt_belongs():
    pair = run([4], [3], [3], [1.0]), vanilla_run(4)
    records = [record(1, pair, pair, prompts=[40, 1100]), record(2, pair, prompts=[2900])]
    parts = by_length(records)
    questions = {name: [each.question_id for each in part] for name, part in parts.items()}
    assert questions == {"shorter": [1], "1k": [1], "4k": [2]}
    assert [turn.prompt_tokens for turn in parts["1k"][0].turns] == [1100]
    assert by_length(records[:1]) == {}  # prompts of one length have no table


def test_texts_that_ended_are_told_from_those_cut_at_the_limit(tmp_path):
    slow, fast = run([4], [3], [3], [4.0]), run([4], [3], [3], [1.0])
    slow.finish = "eos"
    records = [record(1, (slow, vanilla_run(4)), (fast, vanilla_run(4)))]
    records += [record(2, (fast, vanilla_run(4)))]
    finish(tmp_path / "both", records)
    finish(tmp_path / "one", records[1:])
    texts = [comparison.markdown(comparison.compare(tmp_path / x)) for x in ("both", "one")]
    table = texts[0].partition("## Speedup over vanilla by end of the text\n\n")[2].splitlines()
    assert table[0] == "| method | eos | length | overall |"
    assert table[2] == "| both | 1.00 | 2.50 | 1.67 (1.43-2.50) |"
    assert [text.count("by end of the text") for text in texts] == [2, 0]


def by_question(seconds, vanilla):
    return [
        {"question_id": i, "paired_seconds": ours, "vanilla_paired_seconds": theirs}
        for i, (ours, theirs) in enumerate(zip(seconds, vanilla, strict=True))
    ]


@pytest.fixture
def timed():
    """A drafter's seconds, which some questions suit far more than others, and vanilla's."""
    rng = np.random.default_rng(1)
    vanilla = rng.uniform(1, 3, 40)
    return vanilla / rng.uniform(1, 3, 40), vanilla


def compared(**methods):
    return comparison.compare_pair(*methods.items())


def test_a_difference_shows_that_the_intervals_of_the_speedups_hide(timed):
    """One method is 5% faster on every question, whose speedups differ by much more than that.
    Jobs of a sweep are compared by their own baselines: the machine was half as fast during one."""
    seconds, vanilla = timed
    fast, slow = (estimate(np.stack([vanilla, s], 1)).ends for s in (seconds / 1.05, seconds))
    assert fast[0] < slow[1]
    pair = compared(fast=by_question(2 * seconds / 1.05, 2 * vanilla), slow=by_question(*timed))
    assert [pair["speed_ratio"], *pair["speed_ratio_ci95"]] == pytest.approx([1.05] * 3)


def test_methods_that_differ_by_chance_show_no_difference(timed):
    seconds, vanilla = timed
    noise = 1 + np.random.default_rng(2).normal(0, 0.03, len(seconds))
    pair = compared(a=by_question(*timed), b=by_question(seconds * noise, vanilla))
    low, high = pair["speed_ratio_ci95"]
    text = f"{pair['speed_ratio']:.2f} ({low:.2f}-{high:.2f}), no difference shown"
    assert comparison.pair_table([pair]) == [{"": "a", "b": text}]


def test_only_questions_that_both_and_vanilla_answered_are_compared(timed):
    questions = by_question(*timed)
    pair = compared(all=questions, few=questions[:4])
    assert pair["questions"] == 4 and pair["speed_ratio"] == 1
    pair = compared(others=[questions[0] | {"question_id": 100}], few=questions[:4])
    assert (pair["questions"], pair["speed_ratio"]) == (0, None)
    pair = compared(a=by_question([None] * 3, [None] * 3), b=by_question([1, 2, 3], [1, 2, 3]))
    assert pair["speed_ratio"] is pair["speed_ratio_ci95"] is None
    assert comparison.pair_table([pair]) == [{"": "a", "b": "-"}]
