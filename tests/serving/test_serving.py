"""A server answers as decoding alone would, whatever else it does, and refuses by name."""

import asyncio
import gzip
import json
import shlex
import signal
import socket
import subprocess
import time

import httpx
import pytest
from commands import ROOT
from openai import BadRequestError, NotFoundError
from serving_cases import LONGEST, alone, as_body, error_of, served, server_app, serving, target
from tokenizers.processors import TemplateProcessing

from kangaroo import ConfigError, Sampling
from kangaroo.engine.requests import Request
from kangaroo.engine.session import Session
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import plain_text, prompt_ids, text_ids
from kangaroo.serving.scheduler import Scheduler
from kangaroo.serving.serve import ServeConfig, check_memory, listen
from kangaroo.utils import memory

PAGE = ROOT / "docs/serving.md"
TALK = [{"role": "user", "content": "Why?"}]
LOCAL = ["LOCALHOST:80", "127.0.0.1", "[::1]:8000", "192.168.1.7:8000"]
STRANGERS = ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "", "[::1"]


def ask(address: str, path: str = "completions", **body: object) -> httpx.Response:
    return httpx.post(f"{address}/v1/{path}", json=body, timeout=60)


def text_of(address: str, **body: object) -> str:
    return ask(address, **body).json()["choices"][0]["text"]


def post(address: str, content: object, path: str = "/v1/completions", **headers: str):
    headers = {"content-type": "application/json"} | headers
    return httpx.post(address + path, content=content, headers=headers, timeout=60)


def test_openais_client_is_answered_whole_and_streamed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    options = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 7}
    chat = client.chat.completions.create(messages=TALK, **options)
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(messages=TALK, **streaming, **options))
    content = "".join(part.choices[0].delta.content for part in parts[:-1])
    assert content == chat.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == chat.choices[0].finish_reason == "length"
    usage, again = chat.usage, parts[-1].usage
    assert usage.completion_tokens == again.completion_tokens == 12
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1  # all but the last
    text = client.completions.create(prompt="Once", **options)
    streamed = client.completions.create(prompt="Once", stream=True, **options)
    assert "".join(p.choices[0].text for p in streamed) == text.choices[0].text
    with pytest.raises(BadRequestError, match="'echo' is not served here"):
        client.completions.create(prompt="Once", echo=True, **options)


def test_openais_client_may_send_its_own_answer_back(client):
    def answer(*turns: object):
        options = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        chat = client.chat.completions.create(messages=[*TALK, *turns], **options)
        return chat.choices[0].message

    message, more = answer(), {"role": "user", "content": "And then?"}
    assert message.refusal is None and message.model_dump()["tool_calls"] is None
    written = {"role": "assistant", "content": message.content}
    forms = (written, message, message.model_dump(), written | {"annotations": []})
    assert len({answer(form, more).content for form in forms}) == 1
    with pytest.raises(BadRequestError, match=r"messages\.1: 'refusal' is not served here"):
        answer(written | {"refusal": "No."}, more)


def test_openais_client_finds_the_model_by_its_name_and_no_other(client):
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    for ask_for in (
        lambda: client.models.retrieve("someone/other"),
        lambda: client.completions.create(model="someone/other", prompt="a"),
    ):
        with pytest.raises(NotFoundError, match="no model 'someone/other'; this is") as refused:
            ask_for()
        kind = refused.value.type, refused.value.code
        assert kind == ("invalid_request_error", "model_not_found")


def test_a_turn_of_a_chat_is_the_engines_text(address):
    tokenizer = byte_tokenizer()
    prompt, sampling = prompt_ids(tokenizer, TALK), Sampling(temperature=0.9, top_p=0.8)
    request = Request(prompt, 20, 7, sampling=sampling, ignore_eos=True)
    body = {k: v for k, v in as_body(request).items() if k != "prompt"}
    chat = ask(address, "chat/completions", messages=TALK, **body).json()
    assert chat["choices"][0]["message"]["content"] == plain_text(tokenizer, alone(request))
    assert chat["usage"]["prompt_tokens"] == len(prompt)


def test_several_choices_are_those_of_seeds_one_after_another(address):
    options = {"prompt": "Once", "max_tokens": 10, "temperature": 1.2, "ignore_eos": True}
    several = ask(address, n=4, seed=3, **options).json()
    texts = [choice["text"] for choice in several["choices"]]
    single = [text_of(address, seed=3 + i, **options) for i in range(4)]
    assert texts == single and len(set(texts)) > 1
    assert several["usage"]["completion_tokens"] == 40
    for cached in (0, 29):  # the other choices do not count
        usage = ask(address, **options | {"prompt": list(range(40, 70)), "n": 4}).json()["usage"]
        assert usage["prompt_tokens"] == 30
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_each_prompt_of_a_list_is_answered_as_it_is_alone(address):
    options = {"max_tokens": 6, "temperature": 1.2, "ignore_eos": True, "seed": 3}
    for prompts in ["Once", "Why is the sky blue?"], [[1, 2], [9] * 20], ["Once", [1, 2]]:
        alone = [ask(address, prompt=prompt, n=2, **options).json() for prompt in prompts]
        body = {"prompt": prompts, "n": 2, **options}
        together = ask(address, **body).json()
        texts = [choice["text"] for one in alone for choice in one["choices"]]
        assert [choice["text"] for choice in together["choices"]] == texts
        assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
        for kind in ("prompt_tokens", "completion_tokens"):
            assert together["usage"][kind] == sum(one["usage"][kind] for one in alone)
        streamed = [""] * 4
        for line in ask(address, stream=True, **body).text.split("\n\n")[:-2]:
            (part,) = json.loads(line.removeprefix("data: "))["choices"]
            streamed[part["index"]] += part["text"]
        assert streamed == texts


def test_an_eos_that_a_tokenizer_appends_is_not_continued():
    tokenizer = byte_tokenizer()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokens = [(tokenizer.bos_token, bos), (tokenizer.eos_token, eos)]
    single = f"{tokenizer.bos_token} $A {tokenizer.eos_token}"
    processor = TemplateProcessing(single=single, special_tokens=tokens)
    tokenizer.backend_tokenizer.post_processor = processor
    plain = byte_tokenizer().encode("Once", add_special_tokens=False)
    for text, ids in {"Once": plain, f"Once{tokens[1][0]}": [*plain, eos], "": []}.items():
        assert text_ids(tokenizer, text) == [bos, *ids]
    with serving(tokenizer=tokenizer) as address:
        options = {"max_tokens": 6, "temperature": 0}
        expected = text_of(address, prompt=[bos, *plain], **options)
        assert text_of(address, prompt="Once", **options) == expected


def test_a_stop_string_is_not_part_of_the_answer(address):
    options = {"prompt": "Once", "max_tokens": 30, "temperature": 1.0, "seed": 5}
    text = text_of(address, ignore_eos=True, **options)
    stops = [text[7:9], "never there"]
    (choice,) = ask(address, ignore_eos=True, stop=stops, **options).json()["choices"]
    assert choice["text"] == text[: text.index(stops[0])] and choice["finish_reason"] == "stop"


BAD = [
    ({}, "prompt: Field required"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "a", "max_token": 3}, "max_token=3: there is no such field here; leave"),
    ({"prompt": "a" * 300}, "the prompt by 101 or more: one new"),
    ({"prompt": "a", "max_tokens": LONGEST}, "ask for at most"),
    ({"prompt": [1, 10**9]}, "a token outside the model's vocabulary"),
    ([1, 2], "valid dictionary"),
    ({"prompt": "a", "n": 2, "seed": 2**63 - 1}, f"must be {2**63 - 2} or less where n=2"),
    ({"prompt": "a", "temperature": True}, "temperature=true: Input should be a valid number"),
    (b'{"prompt": "a', "the body is not JSON: Unterminated string starting at (at 11)"),
    (b"", "the body: Field required"),
    (b'{"prompt": "\xff\xfe"}', "not JSON: 'utf-8' codec can't decode byte 0xff in position 12"),
    (b"[" * 100_000, "the body is not JSON: maximum recursion depth exceeded"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the limit (4300 digits) for integer"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}", "max_tokens: Input should be less"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature=Infinity: Input should be a finite"),
    ({"prompt": ["a", 5]}, "prompt.1=5: Input should be a valid string"),
    ({"prompt": [[1], [1000]]}, "prompt.1: the prompt holds a token outside the model's"),
    ({"prompt": ["a"] * 300}, "300 texts are more than max_queue=256."),
    ({"prompt": ["a"] * 3000}, "prompt: List should have at most 2048 items"),
    (b'{"prompt": "\\ud800"}', "it holds half of a surrogate pair"),
    (b'{"prompt": "a", "\\ud800": 1}', ""),
]


def test_what_cannot_be_served_is_refused_by_name(address):
    for body, message in BAD:
        answer = post(address, body if isinstance(body, bytes) else json.dumps(body))
        assert answer.status_code == 400 and message in error_of(answer)["message"], answer.text
    answer = post(address, gzip.compress(b"{}"), **{"content-encoding": "gzip"})
    assert "compressed (Content-Encoding: gzip)" in error_of(answer)["message"]


def test_a_body_that_is_not_called_json_is_told_of_the_header(address):
    for headers, sent in ({}, ""), ({"content-type": "text/plain"}, "; 'text/plain' was sent"):
        answer = httpx.post(f"{address}/v1/completions", content=b"{}", headers=headers)
        message = f"the header 'Content-Type: application/json' is missing{sent}."
        assert (answer.status_code, error_of(answer)["message"]) == (400, message)


def test_a_path_or_method_that_there_is_not_has_openais_error(address):
    for method, path, status, code in (
        ("GET", "/v1/none", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_supported"),
    ):
        answer = httpx.request(method, address + path)
        error, kind = error_of(answer), ("invalid_request_error", code)
        assert answer.status_code == status and (error["type"], error["code"]) == kind
        assert error["message"].startswith(f"{method} {path}: ")
    assert "/v1/chat/completions" in httpx.get(f"{address}/").text  # the page


def test_a_page_of_another_name_does_not_reach_the_server(address):
    """DNS rebinding: its name leads here, which only the header Host shows."""

    def status(where: str, host: str, path: str = "/v1/models") -> int:
        return httpx.get(where + path, headers={"host": host}).status_code

    assert {status(address, host) for host in LOCAL} == {200}
    assert {status(address, host) for host in STRANGERS} == {400}
    assert {status(address, "evil.example", path) for path in ("/", "/health", "/metrics")} == {400}
    error = error_of(httpx.get(f"{address}/v1/models", headers={"host": "evil.example"}))
    assert "allowed_hosts=[NAME]" in error["message"] and error["type"] == "invalid_request_error"
    with serving(allowed_hosts=["kangaroo.lan", "*.lab.example"]) as named:
        for host in ("localhost", "Kangaroo.lan:8000", "a.lab.example"):
            assert status(named, host) == 200
        assert status(named, "lab.example.evil") == status(named, "other.lan") == 400
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:  # as some load balancers ask
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    with serving(allowed_hosts=["*"]) as open_to_all:
        assert status(open_to_all, "any.example") == 200


@pytest.mark.parametrize("template", ["{{ 1 + 'a' }}", None])
def test_a_template_that_fails_is_told_as_any_other_refusal(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with serving(tokenizer=tokenizer) as address:
        answer = ask(address, "chat/completions", messages=TALK)
        assert answer.status_code == 400 and "chat template" in error_of(answer)["message"]
        assert ask(address, prompt="a", max_tokens=2).status_code == 200


def test_a_fault_of_the_server_is_an_error_of_openais_shape(address, monkeypatch, caplog):
    def fault(*args: object) -> None:
        raise RuntimeError("as in a test")

    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "check", fault)
        in_route = ask(address, prompt="a")
        assert "(RuntimeError)" in error_of(in_route)["message"]
    with monkeypatch.context() as broken:
        broken.setattr(Session, "record", fault)
        whole, streamed = ask(address, **body), ask(address, stream=True, **body)
    assert in_route.status_code == whole.status_code == 500
    for error in map(error_of, (in_route, whole, streamed)):
        assert (error["code"], error["type"]) == (500, "server_error")
    assert "as in a test" in caplog.text and ask(address, **body).status_code == 200
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_request_is_too_large_whether_its_length_is_told_or_not(address):
    chunks = [b'{"prompt": "', *[b"a" * 100_000] * 20]
    for content in b"".join(chunks), iter(chunks):
        answer = post(address, content)
        assert answer.status_code == 413
        assert error_of(answer)["message"].startswith("a request has at most 1048576 bytes.")
    assert post(address, iter(chunks), "/v1/none").status_code == 404
    assert ask(address, prompt="a", max_tokens=2).status_code == 200


def test_null_and_what_asks_for_nothing_are_as_good_as_left_out(address):
    nothing = {"logprobs": False, "presence_penalty": 0, "logit_bias": {}, "user": "me"}
    body = {"prompt": "a", "max_tokens": 3, "seed": 1}
    assert text_of(address, **body, stop=None, n=None, **nothing) == text_of(address, **body)


def test_a_key_is_asked_for_where_there_is_one():
    with serving(api_key="secret") as address:
        content = b'{"prompt": "a", "max_tokens": 2}'
        assert post(address, content).status_code == 401
        for key, status in (("wrong", 401), ("secret", 200)):
            assert post(address, content, Authorization=f"Bearer {key}").status_code == status
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_client_that_goes_away_frees_its_row(address):
    def load() -> dict:
        return httpx.get(f"{address}/health").json()

    body = {"prompt": "a", "max_tokens": 190, "ignore_eos": True, "stream": True, "n": 3}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=body | {"stream": False}, timeout=0.01)
    until = time.monotonic() + 20
    while load()["running"] + load()["waiting"] and time.monotonic() < until:
        time.sleep(0.02)
    assert load() == {"status": "ok", "running": 0, "entering": 0, "waiting": 0}


@pytest.mark.parametrize("stream, sent", [(True, [200]), (False, [503])])
def test_what_a_stop_cuts_off_ends_without_an_exception(stream, sent):
    """A stream whose client does not read, and a whole answer that takes too long."""
    app, statuses = server_app(), []
    body = {"prompt": "a", "max_tokens": 190, "ignore_eos": True, "n": 16, "stream": stream}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        statuses.extend([message["status"]] if "status" in message else [])
        if statuses == [200]:
            await asyncio.Event().wait()

    async def cancelled():
        async with app.router.lifespan_context(app):
            task = asyncio.create_task(app(scope | {"query_string": b""}, receive, send))
            await asyncio.sleep(0.2)
            task.cancel()
            await task

    asyncio.run(cancelled())
    assert statuses == sent


def test_prometheus_sees_what_was_written(address):
    def metric(name: str) -> float:
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))

    names = ("drafts", "draft_tokens", "accepted_tokens")
    spec = [f"vllm:spec_decode_num_{name}_total" for name in names]  # `vllm bench serve` reads them
    before = metric('kangaroo_tokens_total{kind="completion"}'), *map(metric, spec)
    answer = ask(address, prompt="a", max_tokens=40, ignore_eos=True).json()["metrics"]
    drafts = answer["speculative_decoding"]
    counted = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    expected = 40, *(drafts[name] for name in counted)
    after = metric('kangaroo_tokens_total{kind="completion"}'), *map(metric, spec)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == expected
    assert min(expected) > 0 and sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"]
    assert drafts["mean_acceptance_length"] == 1 + expected[3] / expected[1]
    assert metric('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}') > 0
    assert metric("kangaroo_first_token_seconds_count") > 0


def test_a_stream_is_json_lines_of_server_sent_events_with_counts_if_asked_for(address):
    def streamed(**options: bool) -> list[dict]:
        body = {"messages": TALK, "max_tokens": 9, "ignore_eos": True, "stream": True}
        answer = ask(address, "chat/completions", **body, stream_options=options)
        *parts, last = [line for line in answer.text.splitlines() if line]
        assert last == "data: [DONE]" and all(part.startswith("data: ") for part in parts)
        return [json.loads(part.removeprefix("data: ")) for part in parts]

    parts = streamed(include_usage=True, continuous_usage_stats=True)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-2:] == [9, 9]
    parts = streamed(include_usage=True)
    assert ["usage" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    parts = streamed(continuous_usage_stats=True)
    assert not any("usage" in part for part in parts)
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_what_the_page_shows_works_and_a_stop_lets_texts_end(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    drafter = ["drafter=kangaroo", "drafter.adapter='untrained:2'", f"hydra.run.dir={tmp_path}"]
    with served(*drafter, "max_model_len=4096") as (address, process):
        curl = next(part for part in page.split("```") if part.strip().startswith("curl"))
        line = curl.replace("\\\n", " ").replace("http://127.0.0.1:8000", address)
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done
        code = next(part for part in page.split("```") if part.startswith("python"))
        code = code.removeprefix("python").replace("http://127.0.0.1:8000", address)
        exec(compile(code.replace("smollm2-135m", "tiny"), str(PAGE), "exec"), {})
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
        assert process.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_rows_that_do_not_fit_are_refused_with_what_does(monkeypatch):
    lm = target()
    row = 50 * lm.new_cache(1, 1).bytes()
    free = iter([4 * row, 4 * row - 1, row - 1])
    monkeypatch.setattr(memory, "free", lambda device: next(free))
    check_memory(lm, max_batch_size=4, max_model_len=50)
    fits_3 = "max_batch_size=4 texts of up to 50 tokens .* Pass max_batch_size=3 or"
    for size, message in ((4, fits_3), (1, "Pass max_model_len= fewer tokens")):
        with pytest.raises(ConfigError, match=message):
            check_memory(lm, size, max_model_len=50)


def test_a_port_in_use_is_named(address):
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"nothing can listen on 127.0.0.1:{port}: Address alr"):
        listen(ServeConfig(port=port))
