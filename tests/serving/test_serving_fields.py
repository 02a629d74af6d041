"""Whatever a request's fields hold, it is answered with 200 or 4xx, and the next one as before."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_cases import server_app

from kangaroo.serving import protocol

LONGEST = 40  # tokens: of a turn in its template and a short answer
ENDS = [sign * (2**bits + more) for sign in (1, -1) for bits in (31, 63, 64) for more in (-1, 0)]
FLOATS = [sign * 2.0**power for sign in (1, -1) for power in (-1074, -149, -20, 0, 1, 1023)]
FLOATS += [-0.0, 0.5, math.nextafter(1, 2), math.nextafter(2, 3), math.inf, -math.inf, math.nan]
TEXTS = ["", "a", " ", "\0", "\ud800", "🦘", "e" * 256, "<|im_end|>", "user", "text", "tiny"]
PROMPTS = [[0], [257, 258], [259], [-1], [5] * LONGEST, [2**63], [True], [0.5]]
NESTED = json.loads("[" * 200 + "]" * 200)
LISTS = [[], {}, {"type": "text"}, {"a": {}}, *PROMPTS, ["a", ""], ["b"] * 16, ["b"] * 17, NESTED]
STRANGE = [0, 1, 2, -1, 16, 17, *ENDS, 10**400, *FLOATS, *TEXTS, None, True, False, *LISTS]
GOOD: dict[str, list[Any]] = {  # the extremes of what is answered
    "temperature": [0, 5e-324, 2.0**-149, 1, 2],
    "top_p": [5e-324, 0.5, math.nextafter(1, 0), 1],
    "top_k": [0, 1, 258, 260, 2**31 - 1],
    "seed": [0, -(2**63), 2**32, 2**63 - 16],
    "n": [1, 2, 16],
    "max_tokens": [1, 2, 12],
    "stop": ["e" * 256, ["a", "\0"], "<|im_end|>"],
    "stream": [True, False],
    "ignore_eos": [True, False],
    "tools": [[], None],
}
DRAWN = {"max_examples": 100, "deadline": None, "derandomize": True, "database": None}
FIELDS = [*protocol.UNSUPPORTED, *protocol.IGNORED]
FIELDS += [*protocol.Completion.model_fields, *protocol.Chat.model_fields]


def changed(good: dict[str, Any], fields: Iterable[str], most: int) -> st.SearchStrategy[dict]:
    """An object in which some fields have extremes of some type, or are not known."""
    names = st.sampled_from([*fields, "nonsense"])
    strange = st.dictionaries(names, st.sampled_from(STRANGE), max_size=most)
    return strange.map(lambda chosen: good | chosen)


PART = changed({"type": "text", "text": "Why?"}, protocol.TextPart.model_fields, 1)
TURN = {"role": "user", "content": "Why?"}
TURNS = changed(TURN, [*protocol.ChatMessage.model_fields, *protocol.ChatMessage.unsupported], 2)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body whose fields are drawn from the extremes of all types."""
    is_chat = draw(st.booleans())
    good = {name: st.sampled_from(values) for name, values in GOOD.items()}
    body = draw(st.fixed_dictionaries({}, optional=good))
    body |= {"messages": [TURN]} if is_chat else {"prompt": "Why?"}
    if draw(st.booleans()):
        body = draw(changed(body, FIELDS, 4))
    elif is_chat and draw(st.booleans()):
        parts = draw(st.lists(PART, max_size=2))
        body["messages"] = [*draw(st.lists(TURNS, max_size=2)), TURN | {"content": parts}]
    if body.get("stream") is True:
        body["stream_options"] = draw(changed({}, protocol.StreamOptions.model_fields, 2))
    return "chat/completions" if is_chat else "completions", body


def test_no_field_of_a_request_ends_the_server_or_changes_the_next_text():
    app = server_app(longest=LONGEST)
    fixed, statuses = {"prompt": "Once", "max_tokens": 4, "temperature": 1.0, "seed": 3}, set()

    def ask(path: str, body: Any) -> Any:
        headers, content = {"content-type": "application/json"}, json.dumps(body).encode()
        return client.post(f"/v1/{path}", content=content, headers=headers)

    def text() -> str:
        return ask("completions", fixed).json()["choices"][0]["text"]

    @settings(**DRAWN, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def check(drawn: tuple[str, dict[str, Any]]) -> None:
        answer = ask(*drawn)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert '"server_error"' not in answer.text, answer.text
        assert client.get("/health").status_code == 200
        assert text() == before
        statuses.add(answer.status_code)

    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        before = text()
        check()
    assert {200, 400} <= statuses


BOTH = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
BOTH |= {"ignore_eos": True}
# As `vllm bench serve` (0.33) and AIPerf send them.
MEASURING = {
    "vllm's completions": {"prompt": "Once", "temperature": 0.0, "repetition_penalty": 1.0}
    | {"logprobs": None, "top_k": -1, "min_p": 0, "skip_special_tokens": True, "max_tokens": 5},
    "vllm's chat": {"messages": [TURN | {"content": [{"type": "text", "text": "Why?"}]}]}
    | {"max_completion_tokens": 5},
    "AIPerf's completions": {"prompt": ["Once"], "max_tokens": 5, "min_tokens": 5},
    "AIPerf's chat": {"messages": [TURN], "max_completion_tokens": 5, "min_tokens": 5},
}


@pytest.mark.parametrize("client", MEASURING)
def test_clients_that_measure_read_a_run(client):
    body = BOTH | MEASURING[client]
    path = "chat/completions" if "messages" in body else "completions"
    with TestClient(server_app(longest=LONGEST), "http://localhost") as served:
        lines = served.post(f"/v1/{path}", json=body).text.split("\n\n")
        least = served.post(f"/v1/{path}", json=body | {"min_tokens": 5, "ignore_eos": False})
    *_, last, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    summary = json.loads(last)
    drafts = summary["metrics"]["speculative_decoding"]
    assert summary["usage"]["completion_tokens"] == 5
    assert len(drafts["acceptance_histogram"]) == drafts["num_spec_tokens"] + 1
    assert least.status_code == 400 and "min_tokens=5 is served with ignore_eos" in least.text
