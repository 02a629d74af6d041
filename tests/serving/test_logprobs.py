"""Logprobs in OpenAI's objects are those of the target, whole and streamed, greedy and sampled."""

import pytest
from helpers import forward_logits
from openai import BadRequestError
from serving_cases import target

from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import prompt_ids, text_ids
from kangaroo.serving.logprobs import UNLIKELY

TALK = [{"role": "user", "content": "Why?"}]
OPTIONS = {"model": "tiny", "max_tokens": 10, "seed": 3}


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
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: .*less than or equal to 20"),
    ],
)
def test_impossible_logprobs_are_an_error(client, fields, message):
    with pytest.raises(BadRequestError, match=message):
        client.chat.completions.create(messages=TALK, **OPTIONS, **fields)
