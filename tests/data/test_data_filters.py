"""What goes into a dataset: degenerate text and repeated questions stay out, and are counted."""

from collections import Counter

import pytest

from kangaroo.data.filters import FilterConfig, Questions, answer_spans, repetition, select

GOOD, LOOP = list(range(20)), [1, 2, 3] * 20
QUESTIONS = [
    "How do I bake a sourdough loaf with a crisp crust in a small oven at home?",
    "How do I bake a sourdough loaf with a crisp crust in my small oven at home?",
    "Which three books on the history of the Baltic would you give to a student?",
]


def conversation(*turns):
    """A sample of (question, answer tokens) pairs; a question takes two tokens."""
    messages, ids, mask = [], [], []
    for question, answer in turns:
        text = " ".join(map(str, answer))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        ids += [0, 0, *answer]
        mask += [0, 0] + [1] * len(answer)
    return {"messages": messages, "input_ids": ids, "loss_mask": mask}


def kept(*samples, **settings):
    dropped = Counter()
    return list(select(samples, FilterConfig(**settings), dropped)), dict(dropped)


@pytest.mark.parametrize(
    ("items", "share"), [([], 0), ([1, 2, 3], 0), (GOOD, 0), ([7] * 8, 0.8), (LOOP, 54 / 57)]
)
def test_repetition_is_the_share_of_phrases_that_came_before(items, share):
    assert repetition(items) == pytest.approx(share)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (("Why is it so?", LOOP), "repetitive answer"),
        (("Why is it so?", [5, 6]), "short answer"),
        (("Tell me " + "more and " * 40, GOOD), "repetitive question"),
    ],
)
def test_degenerate_turns_are_dropped_or_cut_off_and_counted(bad, reason):
    fine = (QUESTIONS[2], GOOD)
    assert kept(conversation(bad)) == ([], {reason: 1})
    samples, dropped = kept(conversation(fine, bad, fine))
    assert samples == [conversation(fine)] and dropped == {f"later turns: {reason}": 1}
    healthy = conversation(fine, ("And then?", GOOD))
    assert kept(healthy) == ([healthy], {})
    assert answer_spans(healthy["loss_mask"]) == [(2, 22), (24, 44)]


def test_an_answer_of_blanks_is_empty_however_many_tokens_it_has():
    sample = conversation(("Why?", GOOD))
    sample["messages"][1]["content"] = " \n"
    assert kept(sample) == ([], {"empty answer": 1})


def test_the_first_of_several_like_questions_is_kept():
    samples = [conversation((question, GOOD)) for question in QUESTIONS]
    shouted = conversation((QUESTIONS[0].upper() + "!!", GOOD))
    assert kept(*samples, shouted) == (samples[::2], {"near duplicate": 1, "duplicate": 1})
    assert kept(*samples, shouted, near_duplicate=1.0)[0] == samples


@pytest.mark.parametrize("text", ["?", "???", "", "日本", "🦘🦘", "a" * 100_000])
def test_any_question_meets_itself_alone(text):
    questions = Questions(0.7)
    assert questions.add(text) == "" and questions.add(text) == "duplicate"
    assert questions.add(QUESTIONS[2]) == ""
