"""Draft vocabularies that follow the texts.

Shapes: M tokens, D hidden size, K draft vocabulary.
"""

import pytest
import torch
from helpers import adapter_for, chain_of, graphed, saved_adapter, tiny

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead, TextHead
from kangaroo.models.target import TargetModel

FREQUENT = torch.arange(0, 16)


def rare(head):
    """What it drafts from besides."""
    return head.vocabulary_K[len(FREQUENT) :].tolist()


def test_it_drafts_from_the_tokens_of_the_texts_and_fills_up_the_last_block():
    lm = tiny()
    head = TextHead(lm, FREQUENT, room=32).accelerate(lm)
    assert rare(head) == []
    first, second = [3, 40, 50, 40, 63], [20] * 3
    assert head.follow([first, second])
    assert rare(head)[:4] == [40, 50, 63, 20] and len(rare(head)) == 16
    assert len(set(head.vocabulary_K.tolist())) == head.size == 32
    x_MD = torch.randn(5, 32)
    torch.testing.assert_close(head(x_MD), DraftHead(lm)(x_MD)[:, head.vocabulary_K])
    first.append(44)  # it grows
    assert not head.follow([first, second])
    assert head.follow([second]) and rare(head)[0] == 20 and 40 not in rare(head)
    assert head.follow([[3]]) and rare(head) == []


def test_a_long_text_takes_no_more_than_the_room():
    head = TextHead(tiny(), FREQUENT, room=17)
    head.follow([list(range(63, -1, -1))])
    assert rare(head)[:17] == list(range(63, 46, -1)) and len(rare(head)) == 32
    head = TextHead(tiny(), torch.arange(60), room=512)
    head.follow([list(range(64))])
    assert head.vocabulary_K.tolist() == list(range(64))  # there is no more to fill up with


@pytest.mark.parametrize("accelerated", [TargetModel.compile_for_decoding, graphed])
def test_a_text_of_rare_tokens_is_drafted_from_them_whatever_was_decoded_before(accelerated):
    lm = accelerated(tiny())
    prompts = [list(range(30, 60)), [1, 2, 3], list(range(30, 60))]

    def generated(head):
        engine = Engine(lm, chain_of(lm, adapter_for(lm), 4, 0, head))
        return engine.generate(prompts, 24, batch_size=1)

    fixed, grown = generated(DraftHead(lm, None, FREQUENT)), generated(TextHead(lm, FREQUENT, 48))
    assert [x.tokens for x in grown] == [x.tokens for x in fixed]
    right, now = ([sum(step.accepted for step in x.steps) for x in some] for some in (fixed, grown))
    assert now[0] == now[2] > right[0]


def test_an_adapter_that_reads_the_targets_head_gets_one(tmp_path):
    lm, frequent = tiny(), FREQUENT.tolist()
    plain, own_head = adapter_for(lm), Adapter(lm, 2, AdapterHeadConfig(own_head=True), FREQUENT)

    def head_of(name, adapter, **options):
        folder = str(saved_adapter(lm, adapter, tmp_path / name, frequent, vocabulary=16))
        return KangarooConfig(adapter=folder, **options).load(lm)[1]

    assert head_of("plain", plain).room == 512
    without = head_of("plain", plain, text_vocabulary=0)
    without.follow([[40, 50]])
    assert without.vocabulary_K.tolist() == frequent
    assert type(head_of("plain", plain, vocabulary=0)) is DraftHead
    assert type(head_of("own", own_head)) is DraftHead


def test_for_graphs_which_are_of_one_size_all_of_the_room_is_filled_in_place():
    lm = graphed(tiny())
    head = TextHead(lm, FREQUENT, room=32).accelerate(lm)
    places = head.vocabulary_K.data_ptr(), head.weight_KD.data_ptr()
    for text in ([40, 50], [63], list(range(64))):
        head.follow([text])
        assert rare(head)[:2] == [i for i in [*text, 16] if i > 15][:2]
        assert len(set(head.vocabulary_K.tolist())) == head.size == 48
        assert (head.vocabulary_K.data_ptr(), head.weight_KD.data_ptr()) == places
