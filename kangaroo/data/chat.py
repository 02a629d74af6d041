"""Conversations as tokens: the chat template, and which tokens the assistant wrote."""

from __future__ import annotations

from typing import TypedDict

from transformers import PreTrainedTokenizerBase

from kangaroo.errors import ConfigError, PromptError

_SENTINEL = "kangarookangaroo"  # stands for a user turn while the template around it is read


class Message(TypedDict):
    """One turn: role "system", "user" or "assistant"."""

    role: str
    content: str


class Sample(TypedDict):
    """A tokenised conversation.

    `loss_mask[i]` is 1 where the assistant wrote `input_ids[i]`, its end-of-turn token included:
    the distribution to learn is then the one at position i - 1.
    """

    messages: list[Message]
    input_ids: list[int]
    loss_mask: list[int]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """The conversation up to where the assistant speaks, by the chat template.

    The template writes BOS itself where the model wants one, so none is added.

    Errors: `PromptError` for an empty user turn.
    """
    if not messages or not messages[-1]["content"].strip():
        raise PromptError("the prompt is empty; ask something.")
    text = _render(tokenizer, messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def user_header(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """What stands before a first user turn, as tokens, and the text that ends one.

    Fed the header alone, an aligned model writes a question itself (Magpie, arXiv 2406.08464).
    """
    text = _render(tokenizer, [Message(role="user", content=_SENTINEL)], add_generation_prompt=True)
    before, _, after = text.partition(_SENTINEL)
    ids = tokenizer.encode(before, add_special_tokens=False)
    return ids, after.strip().splitlines()[0]


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; pass "
            "model.chat_template= one of ours (vicuna)."
        )
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text
