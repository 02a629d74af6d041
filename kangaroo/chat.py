"""A terminal chat: text as it is decoded, drafted tokens in colour, and what speculation gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from kangaroo.engine import Engine, Generation
from kangaroo.errors import PromptError
from kangaroo.prompts import Message, plain_text, prompt_ids
from kangaroo.sampling import Sampling
from kangaroo.streaming import pieces


@dataclass
class ChatConfig:
    """How to talk.

    Args:
        color: show accepted draft tokens in colour.
        system: a system prompt; None takes the chat template's own.
    """

    max_new_tokens: int = 512
    color: bool = True
    system: str | None = None


def questions(console: Console) -> Iterator[str]:
    """Lines that the user types, until end of file."""
    while True:
        try:
            yield console.input("[bold]> [/]")
        except EOFError:
            return


def summary(generation: Generation) -> str:
    """One line on an answer: its length, speed, and tokens a target forward."""
    count, steps = len(generation.tokens), len(generation.steps)
    drafted = sum(step.drafted for step in generation.steps)
    accepted = sum(step.accepted for step in generation.steps)
    share = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
    return (
        f"{count} tokens, {count / generation.seconds:.1f} tokens/s, "
        f"compression rate {count / steps:.2f}{share}"
    )


def chat(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, config: ChatConfig,
    console: Console, questions: Iterator[str],
) -> None:  # fmt: skip
    """Answer each question, the conversation so far included; an empty one begins a new one."""
    messages: list[Message] = _start(config)
    for question in questions:
        if not question.strip():
            messages = _start(config)
            console.print("(a new conversation)", style="dim")
            continue
        messages.append(Message(role="user", content=question))
        try:
            generation = _answer(engine, tokenizer, messages, sampling, config, console)
        except PromptError as error:
            console.print(f"{error} (an empty line begins a new conversation)", style="red")
            messages.pop()
            continue
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
            messages.pop()
            continue
        text = plain_text(tokenizer, generation.tokens)
        messages.append(Message(role="assistant", content=text))
        console.print(f"\n[{summary(generation)}]", style="dim", markup=False)


def _start(config: ChatConfig) -> list[Message]:
    return [] if config.system is None else [Message(role="system", content=config.system)]


def _answer(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message],
    sampling: Sampling, config: ChatConfig, console: Console,
) -> Generation:  # fmt: skip
    prompt = prompt_ids(tokenizer, list(messages))
    stream = engine.stream(prompt, config.max_new_tokens, sampling)
    for text, drafted in pieces(iter(stream), tokenizer):
        style = "green" if drafted and config.color else ""
        console.print(Text(text, style=style), end="", soft_wrap=True)
    return stream.generation
