"""A terminal chat: text as it is decoded, drafted tokens in colour, and a line on its speed."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.streaming import pieces
from kangaroo.models.prompts import Message, plain_text, prompt_ids
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Count, Ranged


@dataclass
class ChatConfig(Ranged):
    """How the chat answers."""

    max_new_tokens: Count = 512  # of one answer
    system: str | None = None  # a system prompt; None leaves it to the chat template


def questions(console: Console) -> Iterator[str]:
    """The lines that the user types, until end of file."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 end no conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            yield console.input("[bold]> [/]")
        except EOFError:
            return


def summary(generation: Generation) -> str:
    """One line on an answer: its length, its speed, and tokens per forward of the target."""
    count, steps = len(generation.tokens), generation.steps
    drafted, accepted = sum(x.drafted for x in steps), sum(x.accepted for x in steps)
    share = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
    speed = f"{count} tokens, {count / generation.seconds:.1f} tokens/s"
    return f"{speed}, compression rate {count / len(steps):.2f}{share}"


def chat(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    config: ChatConfig,
    console: Console,
    questions: Iterator[str],
) -> None:
    """Answer each question as a turn of one conversation; an empty question begins a new one, and
    Ctrl-C stops an answer. A question that was stopped, is too long, or is no text is not kept."""
    beginning = [] if config.system is None else [Message(role="system", content=config.system)]
    messages, batch = list(beginning), None
    for question in questions:
        if not question.strip():
            messages = list(beginning)
            console.print("(a new conversation)", style="dim")
            continue
        messages.append(Message(role="user", content=question))
        try:
            prompt, limit = prompt_ids(tokenizer, messages), config.max_new_tokens
            engine.check(Request(prompt, limit))
            longest = len(prompt) + limit
            if batch is None or batch.longest < longest:
                # with room for as many again, since in a new one everything has to be read again
                batch = engine.open(1, max(longest, min(2 * longest, engine.lm.context)), sampling)
            stream = engine.stream(prompt, limit, sampling, batch=batch)
            for text, drafted in pieces(iter(stream), tokenizer):
                shown = Text(text, style="green" if drafted else "")
                console.print(shown, end="", soft_wrap=True)
        except PromptError as error:
            fix = "(an empty line begins a new conversation)"
            console.print(f"{error} {fix}", style="red", markup=False)
            messages.pop()
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
            messages.pop()
        else:
            text = plain_text(tokenizer, stream.generation.tokens)
            messages.append(Message(role="assistant", content=text))
            console.print(f"\n[{summary(stream.generation)}]", style="dim", markup=False)
