"""Restricted texts are those of vanilla decoding, and logprobs those of the target, by OpenAI's
client."""

import json

import pytest
from helpers import forward_logits, tiny_target
from openai import BadRequestError, OpenAI
from serving_cases import target

import kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import prompt_ids, text_ids
from kangaroo.serving.answers import UNLIKELY
from kangaroo.utils.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
BROKEN = {"name": "broken", "schema": {"type": "string", "pattern": "(unclosed"}}
UNKNOWN = {"name": "x", "schema": {"type": "x"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
TALK = [{"role": "user", "content": "Which pet?"}]
OPTIONS = {"model": "tiny", "max_tokens": 10, "seed": 3}


def answers(client: OpenAI, **fields: object) -> list[str]:
    options = {"messages": TALK, "model": "tiny", "max_tokens": 100, "temperature": 0.9, "seed": 1}
    chat = client.chat.completions.create(**options | fields)
    return [choice.message.content for choice in chat.choices]


def test_json_follows_its_schema_with_and_without_drafts(client):
    texts = answers(client, response_format=FORMAT, n=3)
    for text in texts:
        pet = json.loads(text)
        assert set(pet) == {"name", "kind"} and pet["kind"] in ("cat", "dog")
    assert texts == answers(client, response_format=FORMAT, n=3, extra_body={"drafts": False})
    assert len(set(texts)) > 1


def test_an_object_is_asked_for_without_a_schema(client):
    (text,) = answers(client, response_format={"type": "json_object"}, max_tokens=60)
    assert text.startswith("{")
    assert answers(client, response_format={"type": "text"}) == answers(client)


def test_biases_ban_tokens_and_choose_them(client):
    (free,) = answers(client)
    (token,) = byte_tokenizer()(free[0], add_special_tokens=False).input_ids
    (banned,) = answers(client, logit_bias={str(token): -100})
    assert free[0] not in banned
    assert answers(client, logit_bias={str(token): 100}, max_tokens=5) == [5 * free[0]]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"logit_bias": {"9999": 1}}, "logit_bias: 9999 is no token; they are 0 to "),
        ({"logit_bias": {"1": 101}}, "logit_bias.1=.*less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.*valid integer"),
        ({"response_format": {"type": "json_schema"}}, "do not go together"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": FORMAT | {"json_schema": UNKNOWN}}, "the JSON schema: "),
        ({"response_format": FORMAT | {"json_schema": BROKEN}}, r"the JSON schema: .*\(unclosed"),
    ],
)
def test_what_restricts_nothing_that_there_is_is_an_error(client, fields, message):
    with pytest.raises(BadRequestError, match=message):
        answers(client, **fields)


def test_the_library_answers_in_json_too():
    lm = tiny_target()
    model = kangaroo.Model(Engine(lm, Vanilla(), byte_tokenizer()), byte_tokenizer())
    answers = model.generate(["Which pet?", "And now?"], json_schema=SCHEMA, temperature=0.9)
    assert all(json.loads(answer).keys() == {"name", "kind"} for answer in answers)
    with pytest.raises(ConfigError, match="the JSON schema is a str; pass an object"):
        model.generate("Which pet?", json_schema='{"type": "object"}')
    with pytest.raises(ConfigError, match="logit_bias: -1 is no token"):
        model.generate("Which pet?", logit_bias={-1: 3.0})


def expected_V(prompt: list[int], written: list[int]):
    return forward_logits(target(), [*prompt, *written])[-1].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_chats_logprobs_are_the_targets(client, temperature):
    how = OPTIONS | {"messages": TALK, "temperature": temperature}
    asked = {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**how, **asked).choices[0]
    plain = client.chat.completions.create(**how).choices[0]
    assert choice.message.content == plain.message.content
    parts = client.chat.completions.create(**how, **asked, stream=True)
    streamed = [entry for part in parts for entry in part.choices[0].logprobs.content]
    assert streamed == choice.logprobs.content and len(streamed) > 1
    tokenizer, written = byte_tokenizer(), []
    prompt = prompt_ids(tokenizer, TALK)
    unlikely = 0
    for entry in choice.logprobs.content:
        logprobs_V = expected_V(prompt, written)
        best = logprobs_V.topk(3)
        assert [x.logprob for x in entry.top_logprobs] == pytest.approx(best.values.tolist(), 1e-3)
        texts = tokenizer.batch_decode(best.indices[:, None])
        assert [x.token for x in entry.top_logprobs] == texts
        same = [i for i in range(len(logprobs_V)) if tokenizer.decode([i]) == entry.token]
        near = [i for i in same if logprobs_V[i].item() == pytest.approx(entry.logprob, 1e-3)]
        if entry.logprob == UNLIKELY:
            unlikely += 1
            return  # which of several tokens of this text it was is not told
        written.append(near[0])
    assert temperature > 0 or unlikely == 0


def test_a_completions_logprobs_have_offsets(client):
    text = client.completions.create(prompt="Once", logprobs=2, temperature=0, **OPTIONS)
    (choice,) = text.choices
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text or "\N{REPLACEMENT CHARACTER}" in choice.text
    ends = [start + len(token) for start, token in zip(told.text_offset, told.tokens, strict=True)]
    assert told.text_offset == [0, *ends[:-1]]
    prompt = text_ids(byte_tokenizer(), "Once")
    best = expected_V(prompt, []).topk(2)
    first = sorted(told.top_logprobs[0].values(), reverse=True)
    assert first == pytest.approx(best.values.tolist(), 1e-3)
    assert told.token_logprobs[0] == pytest.approx(best.values[0].item(), 1e-3)
    plain = client.completions.create(prompt="Once", temperature=0, **OPTIONS)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=.*less than or equal to 20"),
    ],
)
def test_impossible_logprobs_are_an_error(client, fields, message):
    with pytest.raises(BadRequestError, match=message):
        client.chat.completions.create(messages=TALK, **OPTIONS, **fields)
