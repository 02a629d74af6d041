"""What is streamed is, joined, the text of the whole answer, for every kind of tokenizer."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from kangaroo.engine.requests import Token
from kangaroo.engine.session import Session
from kangaroo.engine.streaming import pieces, whole_text
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import UNFINISHED, plain_text, token_bytes

BYTES = [f"<0x{i:02X}>" for i in range(256)]
SENTENCEPIECE = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WORDS = "<s> ▁ ▁do ▁a n't ▁n't ▁. . , ▁, ▁' ' ▁'s s ▁'ve ▁! ▁re 好 bc".split()


def tokenizer_of(inner, decoder, clean_up=False):
    tokenizer = Tokenizer(inner)
    tokenizer.decoder = decoder
    options = {"bos_token": "<s>", "clean_up_tokenization_spaces": clean_up}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def unigram(words, **options):
    return Unigram([(word, -1.0 - i) for i, word in enumerate(words)], 0, **options)


def ids_of(words):
    return {word: i for i, word in enumerate(words)}


PIECES = "<s> do ##n ' ##' t ##t . , ! s ##ing 're".split()
ENDS = "<s> do</w> n' t</w> .</w> s</w> a".split()
WORDPIECE = WordPiece(ids_of(PIECES), unk_token="<s>")
LLAMA = decoders.Sequence([decoders.Replace("▁", " "), *SENTENCEPIECE])
KINDS = {
    "unigram": tokenizer_of(unigram(WORDS), decoders.Metaspace(), clean_up=True),
    "wordpiece": tokenizer_of(WORDPIECE, decoders.WordPiece()),
    "cleaned wordpiece": tokenizer_of(WORDPIECE, decoders.WordPiece(cleanup=False), clean_up=True),
    "ends of words": tokenizer_of(WordLevel(ids_of(ENDS), unk_token="<s>"), decoders.BPEDecoder()),
    "byte fallback": tokenizer_of(unigram(WORDS + BYTES, byte_fallback=True), LLAMA),
    "byte-level": byte_tokenizer(),
}


@pytest.mark.parametrize("kind", ["byte fallback", "byte-level"])
def test_bytes_of_tokens_join_to_a_character_that_several_tokens_make(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer("🦘", add_special_tokens=False).input_ids
    joined = bytes(byte for token in ids for byte in token_bytes(tokenizer, token))
    assert len(ids) >= 4 and joined.decode().strip() == "🦘"


def streamed(tokenizer, ids, stop=()):
    return "".join(text for text, _ in pieces((Token(i, False) for i in ids), tokenizer, stop))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_whole_text_and_end_before_a_stop_string(kind):
    tokenizer, rng, compared = KINDS[kind], random.Random(3), 0
    for _ in range(500):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 12))]
        if kind.startswith("byte"):  # now and then whole characters
            ids += tokenizer.encode(rng.choice(["é好\n", "🦘", "do ."]), add_special_tokens=False)
        text = streamed(tokenizer, ids)
        assert text == whole_text(ids, tokenizer)
        if UNFINISHED not in text:
            assert text == plain_text(tokenizer, ids)
            compared += 1
        if text:
            start = rng.randrange(len(text))
            stop = text[start : start + 2]
            assert streamed(tokenizer, ids, [stop]) == text[: text.index(stop)]
            assert whole_text(ids, tokenizer, [stop]) == text[: text.index(stop)]
    assert compared >= 50


def test_text_is_what_was_written_whatever_a_tokenizer_would_clean_up():
    tokenizer = KINDS["unigram"]
    ids = [WORDS.index(word) for word in ("▁do", "▁a", "▁.", "▁'s")]
    assert tokenizer.decode(ids) == "do a.'s"
    assert whole_text(ids, tokenizer) == streamed(tokenizer, ids) == "do a . 's"


@pytest.mark.parametrize("before", ["", "é", "好", "🦘"])
def test_a_stop_string_is_seen_behind_a_character_of_several_tokens(before):
    for kind in ("byte fallback", "byte-level"):
        tokenizer = KINDS[kind]
        ids = tokenizer.encode(f"bc{before}\nbc", add_special_tokens=False)
        session = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer))
        end = Session._stop_end(session, ids, 0, ["\n"])
        assert streamed(tokenizer, ids[:end]).strip(" ") == f"bc{before}\n"
