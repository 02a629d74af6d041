"""A chat in the terminal with drafted tokens in colour."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, compression_rate
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.streaming import pieces
from kangaroo.models.prompts import Message, Tokenizer, plain_text, prompt_ids
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Count, Ranged


@dataclass
class ChatConfig(Ranged):
    """Options of the chat."""

    max_new_tokens: Count = 512  # of one answer
    system: str | None = None  # a system prompt; None leaves it to the chat template


def questions(console: Console) -> Iterator[str]:
    """The lines that the user types, until the end of input."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # invalid UTF-8 does not end the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            yield console.input("[bold]> [/]")
        except (EOFError, RuntimeError):  # the second if standard input is closed
            return


def summary(generation: Generation) -> str:
    """One line on an answer's length, speed, compression rate and acceptance."""
    count = len(generation.tokens)
    steps = generation.steps
    drafted = sum(step.drafted for step in steps)
    accepted = sum(step.accepted for step in steps)
    share = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
    speed = f"{count} tokens, {count / generation.seconds:.1f} tokens/s"
    return f"{speed}, compression rate {compression_rate(steps):.2f}{share}"


def chat(
    engine: Engine,
    tokenizer: Tokenizer,
    sampling: Sampling,
    config: ChatConfig,
    console: Console,
    questions: Iterator[str],
) -> None:
    """Answer each question as a turn of one conversation. An empty question begins a new one, and
    Ctrl-C stops an answer; that question is dropped, as is one that is too long or no text."""
    system = [] if config.system is None else [Message(role="system", content=config.system)]
    messages = list(system)
    session = None
    for question in questions:
        if not question.strip():
            messages = list(system)
            console.print("(a new conversation)", style="dim")
            continue
        messages.append(Message(role="user", content=question))
        try:
            prompt = prompt_ids(tokenizer, messages)
            request = Request(prompt, config.max_new_tokens, sampling.seed)
            engine.check(request)
            longest = len(prompt) + config.max_new_tokens
            if session is None or session.batch.longest < longest:
                # room for twice as much, since a new session reads the whole conversation again
                room = max(longest, min(2 * longest, engine.lm.context))
                session = engine.open(1, room, sampling)
            stream = session.stream(request)
            for text, drafted in pieces(iter(stream), tokenizer):
                console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
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
