"""Servers under load: who is asked when, what is kept and made of it, and what can go wrong."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kangaroo.drafters.vanilla import VanillaConfig
from kangaroo.models.loading import TINY, ModelConfig
from kangaroo.under_load import client, report, run
from kangaroo.under_load.client import Measured
from kangaroo.under_load.config import Cell, LoadConfig, Method, cells
from kangaroo.under_load.servers import Server
from kangaroo.utils.errors import ConfigError, DataError, MissingPackage, ProcessLost

ROOT = Path(__file__).parents[1]
MODEL = ModelConfig("tiny", TINY)
TEXTS = {"a question": "an answer", "another": "one more"}
SPEED = {"vanilla": {1: 10.0, 4: 30.0, 16: 60.0}, "ours": {1: 15.0, 4: 33.0, 16: 57.0}}


def written(texts: dict[str, str], speed: float = 10.0, tokens: int = 5, **changes: Any) -> str:
    """A file of guidellm's, as far as it is read."""

    def asked(text: str) -> str:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        return json.dumps({"method": None, "body": {"messages": [message]}})

    means = {
        "output_tokens_per_second": speed,
        "time_to_first_token_ms": 1000 / speed,
        "inter_token_latency_ms": 500 / speed,
        "request_latency": 8 / speed,
        "iter_tokens_per_iteration": 1.5,
    }
    done = [
        {"request_args": asked(text), "output": out, "output_metrics": {"total_tokens": tokens}}
        for text, out in texts.items()
    ]
    requests = {"successful": done, "errored": [], "incomplete": []} | changes
    metrics = {name: {"successful": {"mean": mean}} for name, mean in means.items()}
    return json.dumps({"benchmarks": [{"requests": requests, "metrics": metrics}]})


def known(rounds: int = 3) -> dict[Cell, Measured]:
    """Rounds in which a machine becomes slower and slower."""
    found = {}
    for number in range(rounds):
        for method, speeds in SPEED.items():
            for users, speed in speeds.items():
                slowed = speed / (1 + number)
                numbers = slowed, 1 / slowed, 2 / slowed, 8 / slowed, 1.5
                found[Cell(number, users, method)] = Measured(*numbers, TEXTS)
    return found


BEGUN = {
    "settings": {"model.name": "tiny", "requests": 2, "bench": "demo", "new_tokens": 5},
    "provenance": {
        "command": "load.py",
        "git_revision": "abc",
        "time": "now",
        "hardware": {"cpu": "x", "threads": 2, "cuda": None},
    },
}


# ---- in what order, and what is made of it -----------------------------------------------------


def test_methods_take_turns_at_each_number_of_users():
    config = LoadConfig("", users=[1, 8], rounds=2)
    assert [(c.number, c.users, c.method) for c in cells(config, ["a", "b"])] == [
        *((0, 1, "a"), (0, 1, "b"), (0, 8, "a"), (0, 8, "b")),
        *((1, 1, "b"), (1, 1, "a"), (1, 8, "b"), (1, 8, "a")),
    ]


def test_ratios_are_taken_within_rounds():
    """So that a machine that has become three times slower changes none of them."""
    rows = report.summarise(known(), BEGUN)["rows"]
    ours = {row["users"]: row for row in rows if row["method"] == "ours"}
    assert ours[1]["of_vanilla"]["tokens_per_second"] == pytest.approx(1.5)
    assert ours[16]["of_vanilla"]["total"] == pytest.approx(60 / 57)
    assert ours[4]["tokens_per_second"] == pytest.approx(33 / 2)
    assert ours[4]["tokens_per_second_range"] == pytest.approx([11, 33])
    assert ours[4]["as_vanilla"] == [6, 6]


def test_drafting_pays_up_to_where_it_first_does_not():
    assert report.summarise(known(), BEGUN)["pays_up_to"] == {"ours": 4}
    rows = [
        {"users": users, "method": "ours", "of_vanilla": {"tokens_per_second": ratio}}
        for users, ratio in ((1, 1.2), (2, 0.9), (4, 1.1))
    ]
    assert report.pays_up_to(rows, "ours") == 1
    assert report.pays_up_to(rows[1:], "ours") == 0


def test_the_page_says_what_was_measured_and_where_it_pays(tmp_path):
    found = report.summarise(known(), BEGUN)
    report.write(found, tmp_path)
    page = (tmp_path / report.PAGE).read_text()
    assert "| 4 | ours | 16.5 (1.10x) | 60.6 (0.91x) | 121.2 (0.91x) | 0.5 (0.91x) |" in page
    assert "ours writes more tokens/s than vanilla up to 4 users, and no longer at 16." in page
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / report.RESULTS).read_text())["rows"] == found["rows"]
    report.terminal_table(found)


def test_without_vanilla_there_are_no_ratios():
    alone = {cell: one for cell, one in known().items() if cell.method == "ours"}
    found = report.summarise(alone, BEGUN)
    assert found["pays_up_to"] == {} and "x)" not in report.markdown(found)


def test_a_text_that_is_not_vanillas_shows():
    found = known(1)
    changed = found[Cell(0, 4, "ours")]
    found[Cell(0, 4, "ours")] = Measured(**(vars(changed) | {"texts": TEXTS | {"another": "no"}}))
    assert "1/2" in report.markdown(report.summarise(found, BEGUN))


# ---- what is kept ------------------------------------------------------------------------------


@pytest.fixture
def there():
    """A server that is well, and no more."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Client:
    """In place of guidellm: writes what it would.

    Args:
        ends_after: cells; then it is killed.
    """

    def __init__(self, ends_after: int = 1000):
        self.left, self.asked = ends_after, list[str]()

    def __call__(self, told: dict[str, Any], output: Path, check: object) -> None:
        if not output.name.startswith(run.WARMUP):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.asked.append(output.stem)
        data = told["spec"]["data"][0]["path"]
        rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
        output.parent.mkdir(exist_ok=True)
        count = told["spec"]["constraints"][0]["count"]
        output.write_text(written({row["prompt"]: "text" for row in rows[:count]}))


@pytest.fixture
def config(tmp_path, there, monkeypatch):
    monkeypatch.setattr(client, "client_version", lambda: "0")
    monkeypatch.setattr(client, "measure", Client())
    options: dict[str, Any] = {"users": [1, 2], "rounds": 2, "requests": 2, "new_tokens": 5}
    return lambda **more: LoadConfig(str(tmp_path), urls={"a": there, "b": there}, **options | more)


def test_a_run_that_was_stopped_measures_what_is_missing(config, monkeypatch):
    first, second = Client(ends_after=3), Client()
    monkeypatch.setattr(client, "measure", first)
    with pytest.raises(KeyboardInterrupt):
        run.run(MODEL, {}, config())
    monkeypatch.setattr(client, "measure", second)
    found = run.run(MODEL, {}, config())
    assert len(found) == 8 and len(first.asked) == 3 and len(second.asked) == 5
    assert not set(first.asked) & set(second.asked)
    assert len(run.run(MODEL, {}, config(rounds=3, users=[1, 2]))) == 12  # goes on with more
    assert len(second.asked) == 9


def test_a_cell_in_which_the_client_asked_too_little_is_measured_again(config, monkeypatch):
    """guidellm once asked 31 of 32 questions, and said that all was well."""

    def forgets(told: dict[str, Any], output: Path, check: object) -> None:
        short = output.stem == "1-2-a" and asks.asked.count("1-2-a") < times
        told["spec"]["constraints"][0]["count"] -= short
        asks(told, output, check)

    asks, times = Client(), run.ATTEMPTS
    monkeypatch.setattr(client, "measure", forgets)
    with pytest.raises(
        DataError, match=r"1 of 2 .* guidellm asked no more\. Run it again \('.*1-2-a"
    ):
        run.run(MODEL, {}, config())
    assert asks.asked.count("1-2-a") == run.ATTEMPTS == 3
    asks, times = Client(), 1
    assert len(run.run(MODEL, {}, config())) == 8
    assert asks.asked == ["1-2-a", "1-2-a"]


def test_a_run_does_not_go_on_with_other_settings(config):
    run.run(MODEL, {}, config())
    with pytest.raises(ConfigError, match="requests=2 there, 3 now"):
        run.run(MODEL, {}, config(requests=3))
    assert len(run.run(MODEL, {}, config(requests=3, resume=False))) == 8


def test_all_cells_ask_the_same_spread_over_the_bench(config, tmp_path):
    run.run(MODEL, {}, config(requests=3, resume=False))
    rows = [json.loads(line) for line in (tmp_path / run.PROMPTS).read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 3
    assert {row["output_tokens_count"] for row in rows} == {5}


# ---- what can go wrong -------------------------------------------------------------------------


def test_a_client_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(client, "CLIENT", "no_such_client")
    with pytest.raises(MissingPackage, match=r"pip install .*\[load\]"):
        client.client_version()


def test_more_users_than_requests_are_refused():
    with pytest.raises(ConfigError, match="requests=32 are fewer than the 64 of users="):
        LoadConfig("", users=[1, 64])


def test_names_and_addresses_are_checked_before_anything_starts(config):
    with pytest.raises(ConfigError, match=r"urls\.a is drafters\.a again"):
        run.run(MODEL, {"a": VanillaConfig()}, config())
    with pytest.raises(ConfigError, match="'a/b' names a method"):
        run.run(MODEL, {"a/b": VanillaConfig()}, config())
    with pytest.raises(ConfigError, match="nothing to measure"):
        run.methods_of({}, LoadConfig(""))
    for url, told in (("localhost:1", "begin with http"), ("http://127.0.0.1:9", "Start it first")):
        nobody = config()
        nobody.urls["a"] = url
        with pytest.raises(ConfigError, match=told):
            run.run(MODEL, {}, nobody)


def test_requests_that_failed_are_no_result(tmp_path):
    file = tmp_path / "0-1-ours.json"
    failed = {"info": {"error": "400 Bad Request"}}
    file.write_text(written(TEXTS, errored=[failed]))
    with pytest.raises(DataError, match="2 of 3 requests were answered: 400 Bad Request"):
        client.read(file, 3, 5)
    file.write_text(written(TEXTS, tokens=4))
    with pytest.raises(DataError, match="4 to 4 tokens instead of 5"):
        client.read(file, 2, 5)
    file.write_text("{")
    with pytest.raises(DataError, match=r"is no result of guidellm\. Delete it"):
        client.read(file, 2, 5)


def test_a_server_that_has_died_is_told_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "ours.log"
    log.write_text("\n".join(f"line {i}" for i in range(50)))
    gone: Any = SimpleNamespace(is_alive=lambda: False, exitcode=-9)
    with pytest.raises(ProcessLost, match=r"(?s)ours has ended with code -9.*ours.log':\nline 38"):
        Server(Method("ours"), "", gone, log).check()


def plan(tmp_path: Path) -> dict[str, Any]:
    return client.scenario("http://127.0.0.1:9", tmp_path / "p", 1, 1, tmp_path / "x.partial")


@pytest.mark.parametrize("code", [0, 3])
def test_a_client_that_ends_without_a_result_is_told_with_its_log(code, tmp_path, monkeypatch):
    (tmp_path / "ending.py").write_text(f"print('why it ended'); raise SystemExit({code})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(client, "CLIENT", "ending")
    with pytest.raises(ProcessLost, match=f"(?s)ended with code {code}.*0-1-a.*why it ended"):
        client.measure(plan(tmp_path), tmp_path / "0-1-a.json", lambda: None)
    assert not (tmp_path / "0-1-a.json").exists()


def test_the_client_ends_when_the_server_does(tmp_path, monkeypatch):
    (tmp_path / "asleep.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(client, "CLIENT", "asleep")

    def gone() -> None:
        raise ProcessLost("the server has ended")

    with pytest.raises(ProcessLost, match="the server has ended"):
        client.measure(plan(tmp_path), tmp_path / "0-1-a.json", gone)
    assert not any("asleep" in " ".join(p.cmdline()) for p in psutil.Process().children())


# ---- the whole command -------------------------------------------------------------------------

needs_client = pytest.mark.skipif(find_spec("guidellm") is None, reason="needs kangaroo[load]")
SMALL = [
    *("model=tiny", "requests=2", "users=[1,2]", "rounds=1", "new_tokens=8", "server.rows=2"),
    *("~drafter@drafters.draft_model", "~drafter@drafters.hybrid"),
    "drafters.kangaroo.adapter='untrained:2'",
]


def command(here: Path) -> subprocess.Popen[str]:
    """The first line of the page, at a small size."""
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("python scripts/load.py"))
    script = ROOT / line.split()[1]
    typed = [sys.executable, str(script), *SMALL]
    pipe = subprocess.PIPE
    return subprocess.Popen(typed, cwd=here, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@needs_client
def test_the_command_goes_on_after_a_kill_and_leaves_no_server(tmp_path):
    output = tmp_path / "outputs/load/tiny"
    first = output / "cells/0-1-vanilla.json"
    killed = command(tmp_path)
    while not first.exists():
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.1)
    left = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive, "servers and client end with the command"
    kept = first.stat().st_mtime_ns
    again = command(tmp_path)
    told, _ = again.communicate(timeout=600)
    assert again.returncode == 0 and "1 of 4 cells are in" in told, told
    assert first.stat().st_mtime_ns == kept
    found = json.loads((output / report.RESULTS).read_text())
    assert [(row["users"], row["method"]) for row in found["rows"]] == [
        *((1, "vanilla"), (1, "kangaroo"), (2, "vanilla"), (2, "kangaroo"))
    ]
    assert all(row["as_vanilla"] == [2, 2] for row in found["rows"])
    assert (output / report.PLOT).is_file() and found["provenance"]["git_revision"]


@pytest.mark.slow
@needs_client
def test_a_server_that_cannot_start_says_why(tmp_path):
    typed = [*SMALL, "model.path=nowhere/at-all"]  # each server loads the model itself
    script = str(ROOT / "scripts/load.py")
    done = subprocess.run(
        [sys.executable, script, *typed], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "ModelNotFound: 'nowhere/at-all'" in done.stderr, done.stderr
