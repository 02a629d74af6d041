"""Turns conversations into tokens by the chat template, and finds the assistant's tokens."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typing_extensions import NotRequired

from kangaroo.utils.errors import ConfigError, PromptError, explained

Tokenizer = PreTrainedTokenizerBase
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_NAMES = " or ".join(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to
_SENTINEL = "kangarookangaroo"  # the content of a turn while the template around it is read
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks the assistant's part in a template


def valid_text(text: str) -> str:
    """Return the text. Errors: `ValueError` for a lone surrogate, which strings of Python and JSON
    can hold, and tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        piece = text[max(0, error.start - 20) : error.start + 1]
        problem = f"it holds half of a surrogate pair, which is no character: {piece!a}"
        raise ValueError(problem) from error
    return text


def sanitized(text: str) -> str:
    """The text with a question mark for each lone surrogate."""
    return text.encode(errors="replace").decode()


class Message(TypedDict):
    """One turn, with the role "system", "user" or "assistant". An answer of weight 0 (as in
    OpenAI's fine-tuning files) is read, and not learned."""

    role: str
    content: str
    weight: NotRequired[int]


def content_text(content: Any) -> str:
    """A message's content: a string, or OpenAI's text parts, which are joined. Errors:
    `ValueError`, whose text continues a sentence that begins with "content"."""
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


def conversation(prompt: Any) -> list[Message]:
    """The messages of an `api.Prompt`. Errors: `PromptError` for anything else."""
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if not isinstance(prompt, list | tuple | Mapping):
        raise PromptError(f"{prompt!r} is no prompt; pass a string or a list of messages.")
    messages = []
    for message in [prompt] if isinstance(prompt, Mapping) else prompt:
        match message:
            case {"role": str(role), "content": content}:
                try:
                    text = content_text(content)
                except ValueError as error:
                    problem = f"a message of '{role}' is no text: its content {error}."
                    raise PromptError(problem) from error
                messages.append(cast(Message, {**message, "content": text}))
            case _:
                fix = "write {'role': 'user', 'content': '...'}"
                raise PromptError(f"{message!r} is no message of a conversation; {fix}.")
    return messages


class Sample(TypedDict):
    """A tokenized conversation. `loss_mask[i]` is 1 if the assistant wrote `input_ids[i]`, ends of
    turns included; `teacher` has records of the distributions to learn, that of token i at i -
    1."""

    messages: list[Message]
    input_ids: list[int]
    loss_mask: list[int]
    teacher: NotRequired[np.ndarray]


def prompt_ids(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Token ids of a conversation up to the assistant's answer; BOS is the template's. Errors:
    `PromptError` for an empty, invalid or refused prompt; `ConfigError` without a template."""
    if not messages or not messages[-1]["content"].strip():
        raise PromptError("the prompt is empty; ask something.")
    text = _render(tokenizer, messages, add_generation_prompt=True)
    # not verbose, since the engine itself reports what is too long
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text to continue: with the tokenizer's BOS, without the EOS that some
    append."""
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    end = len(ids)
    while end > 1 and encoded["special_tokens_mask"][end - 1]:
        end -= 1
    return ids[:end]


def chat_template(name: str) -> str:
    """The Jinja text of a template in `models/templates`. Errors: `ConfigError`."""
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        fix = f"Pass model.chat_template={TEMPLATE_NAMES}."
        raise ConfigError(f"there is no chat template '{name}'. {fix}")
    return file.read_text(encoding="utf-8")


def unknown_token(ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer | None = None) -> str:
    """Describes the first of these ids that is outside the vocabulary; "" if there is none."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return ""
    token = next(i for i in ids if not 0 <= i < vocab_size)
    name = tokenizer.convert_ids_to_tokens(token) if tokenizer and token >= 0 else None
    shown = "" if name is None else f" ({name!r})"
    return f"a token outside the model's vocabulary of {vocab_size}: {token}{shown}"


def plain_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of these tokens as it was written, without special tokens. (A tokenizer's clean-up
    would make "git add ." another command, and change text that was streamed before.)"""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return cast(str, tokenizer.decode(ids, **options))


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """The bytes of a token's text, which may be a part of a character; None if the tokenizer does
    not name them."""
    text = plain_text(tokenizer, [token])
    if UNFINISHED not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's
        return [int(byte[1], 16)]
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return [byte_of[x] for x in piece] if byte_of.keys() >= set(piece) else None


def user_header(
    tokenizer: Tokenizer, history: list[Message] | None = None
) -> tuple[list[int], str]:
    """The tokens before the user's next turn, after which an aligned model itself writes a question
    (Magpie, arXiv 2406.08464), and the text that ends a user's turn. Errors: `ConfigError`."""
    turns = [*(history or []), Message(role="user", content=_SENTINEL)]
    before, _, after = _render(tokenizer, turns, add_generation_prompt=True).partition(_SENTINEL)
    if not after.strip():
        raise ConfigError(
            f"the chat template of '{tokenizer.name_or_path}' writes nothing after a user's turn, "
            "so a question that the model writes would not end. Pass model.chat_template= another "
            "one, or take questions from elsewhere (data=conversations)."
        )
    return tokenizer.encode(before, add_special_tokens=False), after.strip().splitlines()[0]


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token by which the template ends an assistant's turn; None if there is none."""
    turns = [Message(role=role, content=_SENTINEL) for role in ("user", "assistant")]
    try:
        text = _render(tokenizer, turns, add_generation_prompt=False)
    except (ConfigError, PromptError):  # there is no template, or it refuses a conversation
        return None
    after = text.rpartition(_SENTINEL)[2].strip()
    first = next(iter(tokenizer.encode(after, add_special_tokens=False)), None)
    return first if first in tokenizer.added_tokens_decoder else None


def masked_ids(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = False
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a complete conversation. The assistant's part ends with the
    end-of-turn token, unless the template has `{% generation %}` markers. A token across the part's
    beginning belongs to the template, since no model writes it after the prompt. Otherwise the ids
    before the last answer are those of `prompt_ids`, though some tokenizers split the end of a
    prompt differently if text follows. Errors: `PromptError` if the template refuses the
    conversation, `ConfigError` if it does not show the assistant's part."""
    ids, mask = _masked_text(tokenizer, messages, add_generation_prompt)
    if messages[-1]["role"] == "assistant" and any(mask):
        prompt, prompt_mask = _masked_text(tokenizer, messages[:-1], add_generation_prompt=True)
        end = len(mask) - mask[::-1].index(1)
        begin = end - [*mask[:end][::-1], 0].index(0)
        if tokenizer.decode(ids[:begin]) == tokenizer.decode(prompt):
            return prompt + ids[begin:], prompt_mask + mask[begin:]
    return ids, mask


def _masked_text(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool
) -> tuple[list[int], list[int]]:
    """The ids and mask of the whole conversation, rendered and tokenized in one piece."""
    if not any(message["role"] == "assistant" for message in messages):
        ids = prompt_ids(tokenizer, messages)
        return ids, [0] * len(ids)
    if _GENERATION.search(str(tokenizer.chat_template)):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = _apply_template(tokenizer, messages, add_generation_prompt, **options)
        return encoded["input_ids"], encoded["assistant_masks"]
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' does not say where its tokens are in a "
            "text, which the loss mask needs. Install one that `tokenizers` can load."
        )
    text = _render(tokenizer, messages, add_generation_prompt)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [0] * len(encoded["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        after = _render(tokenizer, messages[: index + 1], add_generation_prompt=False).rstrip()
        if not (text.startswith(after) and after.startswith(before.rstrip())):
            raise ConfigError(
                f"the chat template of '{tokenizer.name_or_path}' writes turn {index + 1} of a "
                "conversation differently if more turns follow. Mark what the assistant wrote "
                "with {% generation %} in it, pass model.chat_template= another one, or use "
                "conversations of one turn."
            )
        start = len(before if after.startswith(before) else before.rstrip())
        for i, (first, last) in enumerate(encoded["offset_mapping"]):
            # `last > start`, since byte-level tokenizers give trimmed blanks no width
            if start <= first < len(after) and last > start:
                mask[i] = 1
    return encoded["input_ids"], mask


def _render(tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; pass "
            f"model.chat_template={TEMPLATE_NAMES}."
        )
    text = _apply_template(tokenizer, messages, add_generation_prompt, tokenize=False)
    with explained(PromptError, "the prompt is no text", "Write it in whole characters."):
        return valid_text(text)


def _apply_template(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool, **options: Any
) -> Any:
    options["add_generation_prompt"] = add_generation_prompt
    try:
        return tokenizer.apply_chat_template(cast(Any, messages), **options)
    except Exception as error:  # a template may raise anything
        roles = ", ".join(message["role"] for message in messages)
        fault = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        raise PromptError(
            f"the chat template of '{tokenizer.name_or_path}' refuses a conversation of {roles} "
            f"({fault}{error}). If the system turn is the reason, leave it out; if the template "
            f"is, pass model.chat_template={TEMPLATE_NAMES}."
        ) from error
