"""Conversations as tokens: the chat template, and which tokens the assistant wrote."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from typing_extensions import NotRequired

from kangaroo.utils.errors import ConfigError, PromptError

Tokenizer = PreTrainedTokenizerBase
TEMPLATES = Path(__file__).parent / "templates"

_SENTINEL = "kangarookangaroo"  # stands for a user turn while the template around it is read
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # how a template marks the assistant's part


def whole(text: str) -> str:
    """The text. Errors: `ValueError` for half of a surrogate pair, which Python, JSON and a
    terminal's bytes can hold, and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        piece = text[max(0, error.start - 20) : error.start + 1]
        raise ValueError(
            f"it holds half of a surrogate pair, which is no character: {piece!a}"
        ) from error
    return text


def mended(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair (`whole`)."""
    return text.encode(errors="replace").decode()


class Message(TypedDict):
    """One turn: role "system", "user" or "assistant"."""

    role: str
    content: str


def content_text(content: Any) -> str:
    """What a message says: a string, or the strings of OpenAI's text parts, joined. Errors:
    `ValueError`, which says what it is, after a word like "content"."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        kind = "null" if content is None else f"of type {type(content).__name__}"
        raise ValueError(f"is {kind}, neither text nor a list of text parts")
    texts = []
    for number, part in enumerate(content, start=1):
        fields = part if isinstance(part, Mapping) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = f"of type {fields['type']!r}" if "type" in fields else type(part).__name__
            raise ValueError(f"has a part that is no text (part {number}, {kind})")
        texts.append(fields["text"])
    return "".join(texts)


class Sample(TypedDict):
    """A tokenised conversation. `loss_mask[i]` is 1 where the assistant wrote `input_ids[i]`, its
    end-of-turn token included: the distribution to learn is the one at position i - 1. `teacher`
    has a record of it (`topk_logits.py`) for each such token, in order, where these were kept."""

    messages: list[Message]
    input_ids: list[int]
    loss_mask: list[int]
    teacher: NotRequired[np.ndarray]


def prompt_ids(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Token ids of the conversation up to where the assistant begins, by the chat template, which
    writes BOS itself where the model needs one. Errors: `PromptError` for an empty user turn, one
    that is no text (`whole`) or that the template refuses; `ConfigError` where there is none."""
    if not messages or not messages[-1]["content"].strip():
        raise PromptError("the prompt is empty; ask something.")
    text = _render(tokenizer, messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def shipped_templates() -> str:
    """The names of the templates in `kangaroo/models/templates`, for a message."""
    return " or ".join(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))


def chat_template(name: str) -> str:
    """The Jinja text of that template in `models/templates`; `ConfigError` if there is none."""
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        raise ConfigError(
            f"there is no chat template '{name}'. Pass model.chat_template={shipped_templates()}."
        )
    return file.read_text(encoding="utf-8")


def plain_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of one sequence, without special tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)  # a list only for several sequences
    return text


def user_header(
    tokenizer: Tokenizer, history: list[Message] | None = None
) -> tuple[list[int], str]:
    """The tokens before the user's next turn, and the text that ends a user turn. After them an
    aligned model writes a question itself (Magpie, arXiv 2406.08464). Errors: `ConfigError` for a
    template by which nothing ends a user turn."""
    turns = [*(history or []), Message(role="user", content=_SENTINEL)]
    before, _, after = _render(tokenizer, turns, add_generation_prompt=True).partition(_SENTINEL)
    if not after.strip():
        raise ConfigError(
            f"the chat template of '{tokenizer.name_or_path}' writes nothing after a user's turn, "
            "so a question that the model writes would not end. Pass model.chat_template= another "
            "one, or take questions from elsewhere (data=conversations)."
        )
    ids = tokenizer.encode(before, add_special_tokens=False)
    return ids, after.strip().splitlines()[0]


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that the template ends an assistant's turn with; None where it is none."""
    if tokenizer.chat_template is None:
        return None
    turns = [Message(role=role, content=_SENTINEL) for role in ("user", "assistant")]
    try:
        text = _render(tokenizer, turns, add_generation_prompt=False)
    except PromptError:
        return None
    after = text.rpartition(_SENTINEL)[2].strip()
    first = next(iter(tokenizer.encode(after, add_special_tokens=False)), None)
    return first if first in tokenizer.added_tokens_decoder else None


def masked_ids(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = False
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation that is already written.

    The assistant's part is from where it would begin to write to the end-of-turn token, or as
    `{% generation %}` markers in the template say; a token that spans the beginning is the
    template's, since no model writes it after that prompt. Before a last answer the ids are those
    of `prompt_ids`, unless a token spans its beginning: some tokenizers split the end of a prompt
    in another way if text follows. Errors: `PromptError` where the template refuses it,
    `ConfigError` where it does not show which part is the assistant's.
    """
    ids, mask = _masked_text(tokenizer, messages, add_generation_prompt)
    if messages[-1]["role"] == "assistant" and any(mask):
        prompt, earlier = _masked_text(tokenizer, messages[:-1], add_generation_prompt=True)
        end = len(mask) - mask[::-1].index(1)
        begin = end - [*mask[:end][::-1], 0].index(0)
        if tokenizer.decode(ids[:begin]) == tokenizer.decode(prompt):
            return prompt + ids[begin:], earlier + mask[begin:]
    return ids, mask


def _masked_text(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool
) -> tuple[list[int], list[int]]:
    """`masked_ids` of the rendered text as one piece."""
    if not any(message["role"] == "assistant" for message in messages):
        ids = prompt_ids(tokenizer, messages)
        return ids, [0] * len(ids)
    if _GENERATION.search(str(tokenizer.chat_template)):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = _applied(tokenizer, messages, add_generation_prompt, **options)
        return encoded["input_ids"], encoded["assistant_masks"]
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' does not say where its tokens are in a "
            "text, which the loss mask needs. Install one that `tokenizers` can load."
        )
    text = _render(tokenizer, messages, add_generation_prompt)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [0] * len(encoded["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        after = _render(tokenizer, messages[: index + 1], add_generation_prompt=False).rstrip()
        if not (text.startswith(after) and after.startswith(before.rstrip())):
            raise ConfigError(
                f"the chat template of '{tokenizer.name_or_path}' writes turn {index + 1} of a "
                "conversation in another way if more turns follow. Mark what the assistant wrote "
                "with {% generation %} in it, pass model.chat_template= another one, or use "
                "conversations of one turn."
            )
        start, stop = len(before if after.startswith(before) else before.rstrip()), len(after)
        for place, (first, last) in enumerate(encoded["offset_mapping"]):
            # `last`: byte-level tokenizers report a trimmed blank as a point, here the header's
            if start <= first < stop and last > start:
                mask[place] = 1
    return encoded["input_ids"], mask


def _render(tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; pass "
            f"model.chat_template={shipped_templates()}."
        )
    text = _applied(tokenizer, messages, add_generation_prompt, tokenize=False)
    try:
        return whole(text)
    except ValueError as error:
        raise PromptError(
            f"the prompt is no text: {error}. Write it in whole characters."
        ) from error


def _applied(
    tokenizer: Tokenizer,
    messages: list[Message],
    add_generation_prompt: bool,
    **options: Any,
) -> Any:
    """What the chat template makes of a conversation; a template may raise anything."""
    options["add_generation_prompt"] = add_generation_prompt
    try:
        return tokenizer.apply_chat_template(cast(Any, messages), **options)
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        fault = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        raise PromptError(
            f"the chat template of '{tokenizer.name_or_path}' refuses a conversation of {roles} "
            f"({fault}{error}). If the system turn is the reason, leave it out; if the template "
            f"is, pass model.chat_template={shipped_templates()}."
        ) from error
