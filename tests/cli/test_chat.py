"""The terminal chat: whole characters, colours for drafted tokens, the line of numbers."""

import io

import pytest
from helpers import adapter_for, chain_of, tiny_target
from rich.console import Console

from kangaroo.chat import ChatConfig, chat, questions, summary
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.session import Session
from kangaroo.models.loading import byte_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target(), byte_tokenizer()


def talk(target, questions):
    lm, tokenizer = target
    engine = Engine(lm, chain_of(lm, adapter_for(lm), threshold=0), tokenizer, prefix_cache=True)
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    config = ChatConfig(max_new_tokens=16)
    chat(engine, tokenizer, Sampling(temperature=1.0), config, console, iter(questions))
    return console.file.getvalue()


def test_a_turn_is_read_from_where_the_last_one_ended(target, monkeypatch):
    prompts, answers, stream = [], [], Session.stream

    def recorded(self, request):
        tokens = stream(self, request)
        prompts.append(request.prompt)
        answers.append(tokens.generation)
        return tokens

    monkeypatch.setattr(Session, "stream", recorded)
    talk(target, ["Why?", "And then?", "Say it again.", "", "What now?", "", "Why?"])
    reused = [answer.reused for answer in answers]
    header = next(i for i, (a, b) in enumerate(zip(*prompts[2:4], strict=False)) if a != b)
    # the second has no room in the batch of the first; of its answer, characters are not whole
    assert reused[:2] == [0, 0] and reused[2] >= len(prompts[1])
    assert reused[3] == reused[4] == header > 0  # of another conversation, its beginning


def test_each_answer_has_its_numbers_and_an_empty_line_begins_a_new_conversation(target):
    text = talk(target, ["Why?", "", "Why?"])
    assert "\x1b[32m" in text  # drafted tokens
    assert text.count("compression rate") == 2 and text.count("tokens/s") == 2
    assert text.count("a new conversation") == 1


def test_a_conversation_too_long_for_the_context_says_so_and_goes_on(target):
    lm, _ = target
    text = talk(target, ["x" * lm.context, "Why?"])
    assert "Shorten the prompt" in text and str(lm.context) in text
    assert text.count("compression rate") == 1


def test_bytes_that_are_no_text_end_no_conversation(target, monkeypatch):
    """Nor what looks like the console's markup in the error; without an input there is none."""
    typed = io.TextIOWrapper(io.BytesIO(b"Why?\n[/b]\xff\nAnd then?\n"), "utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    text = talk(target, questions(Console(file=io.StringIO())))
    assert text.count("half of a surrogate pair") == 1
    assert text.count("compression rate") == 2
    monkeypatch.setattr("sys.stdin", None)
    assert not talk(target, questions(Console(file=io.StringIO())))


def test_the_numbers_are_those_of_the_steps():
    steps = [StepRecord([1, 2, 3], 2, 4, 0.1, 0.2, 0.1), StepRecord([4], 0, 2, 0.1, 0.2, 0.1)]
    line = summary(Generation([1, 2, 3, 4], steps, "length", prefill_seconds=0.2))
    assert line.startswith("4 tokens, 4.0 tokens/s, compression rate 2.00, 2 of 6 draft tokens")
