"""Targets and settings for the tests of training data."""

from helpers import tiny_target

from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import SynthesisConfig
from kangaroo.models.loading import byte_tokenizer

NO_FILTERS = FilterConfig(min_answer_tokens=0, max_repetition=1, near_duplicate=1)


def target(native=True):
    """A target, which writes by native code or by tensors, and its tokenizer."""
    lm = tiny_target()
    return lm.compile_for_decoding() if native else lm, byte_tokenizer()


def brief(native=True):
    """One that ends a turn after some ten tokens."""
    lm, tokenizer = target(native)
    lm.hf.generation_config.eos_token_id = [257, *range(100, 120)]
    return lm, tokenizer


def settings(path, **changes):
    fields = {"shards": 3, "shard_size": 4, "batch_size": 3, "keep_unfinished_questions": True}
    fields |= {"max_question_tokens": 8, "max_answer_tokens": 12}
    return SynthesisConfig(path=str(path), **(fields | changes))
