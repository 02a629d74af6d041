"""Requests that restrict their text are answered as vanilla decoding would, by OpenAI's client."""

import json

import pytest
from helpers import tiny_target
from openai import BadRequestError, OpenAI

import kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
TALK = [{"role": "user", "content": "Which pet?"}]


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
        ({"logit_bias": {"1": 101}}, "logit_bias.1: .*less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.*valid integer"),
        ({"response_format": {"type": "json_schema"}}, "do not go together"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        (
            {"response_format": FORMAT | {"json_schema": {"name": "x", "schema": {"type": "x"}}}},
            "the JSON schema: ",
        ),
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
