"""A chat in the terminal with drafted tokens in colour, and a race between several methods."""

import io
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kangaroo.drafters.base import Drafter
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, Token, compression_rate
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.streaming import pieces
from kangaroo.models.prompts import Message, Tokenizer, plain_text, prompt_ids
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Count, Ranged

FRAME_SECONDS = 1 / 30
MARGIN = 8  # terminal lines without text of an answer


@dataclass
class ChatConfig(Ranged):
    """Options of the chat."""

    max_new_tokens: Count = 512  # of one answer
    system: str | None = None  # a system prompt; None leaves it to the chat template


def questions(console: Console) -> Iterator[str]:
    """The lines that the user types, until end of file."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # invalid UTF-8 does not end the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            yield console.input("[bold]> [/]")
        except (EOFError, RuntimeError):  # the second if standard input is closed
            return


def summary(generation: Generation) -> str:
    """One line on an answer's length, speed, and tokens per forward of the target."""
    count, steps = len(generation.tokens), generation.steps
    drafted, accepted = sum(x.drafted for x in steps), sum(x.accepted for x in steps)
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
    Ctrl-C stops an answer. A question that was stopped, is too long, or is no text is dropped."""
    system = [] if config.system is None else [Message(role="system", content=config.system)]
    messages, session = list(system), None
    for question in questions:
        if not question.strip():
            messages = list(system)
            console.print("(a new conversation)", style="dim")
            continue
        messages.append(Message(role="user", content=question))
        try:
            prompt, limit = prompt_ids(tokenizer, messages), config.max_new_tokens
            engine.check(Request(prompt, limit))
            longest = len(prompt) + limit
            if session is None or session.batch.longest < longest:
                # twice the room, since a new session has to read the whole conversation again
                room = max(longest, min(2 * longest, engine.lm.context))
                session = engine.open(1, room, sampling)
            stream = session.stream(Request(prompt, limit, sampling.seed))
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


@dataclass
class Runner:
    """A method's answer, and its pieces: time in seconds, text, and whether it was drafted."""

    name: str
    generation: Generation
    pieces: list[tuple[float, str, bool]]

    def text(self, now: float) -> Text:
        """The text after `now` seconds, with drafted pieces in green."""
        pieces = (piece for piece in self.pieces if piece[0] <= now)
        return Text.assemble(*((text, "green" if drafted else "") for _, text, drafted in pieces))


def race(
    lm: TargetModel,
    tokenizer: Tokenizer,
    drafters: Mapping[str, Drafter],
    messages: list[Message],
    max_new_tokens: int,
    sampling: Sampling,
    console: Console,
) -> None:
    """Answer these messages with each drafter, then show the answers side by side at the measured
    speeds, or one below the other in a pipe. Errors: `PromptError` for a too long question."""
    prompt = prompt_ids(tokenizer, messages)
    limit = min(max_new_tokens, max(1, lm.context - len(prompt)))
    runners = []
    for name, drafter in drafters.items():
        engine = Engine(lm, drafter)
        for _ in range(2):  # the first one warms up
            (answer,) = engine.generate([prompt], limit, sampling, seeds=[sampling.seed])
        runners.append(Runner(name, answer, list(timed_pieces(answer, tokenizer))))
    console.print(Text(messages[-1]["content"], style="bold"), soft_wrap=not console.is_interactive)
    end = max(runner.generation.seconds for runner in runners)
    if not console.is_interactive:
        for runner in runners:
            console.print(Text(f"\n{runner.name}: {summary(runner.generation)}"), soft_wrap=True)
            console.print(runner.text(end), soft_wrap=True)
        return
    caption = "Decoded in turn, shown at the measured speeds; green: drafted and accepted."
    console.print(caption, style="dim", highlight=False)
    start, lines = time.perf_counter(), max(1, console.height - MARGIN)
    with Live(console=console, auto_refresh=False) as live:
        while (now := time.perf_counter() - start) < end:
            live.update(frame(runners, now, console, lines), refresh=True)
            time.sleep(FRAME_SECONDS)
        live.update(frame(runners, end, console), refresh=True)


def timed_pieces(answer: Generation, tokenizer: Tokenizer) -> Iterator[tuple[float, str, bool]]:
    """A `Runner`'s pieces, each with the time of the step that completed it."""
    seconds = answer.prefill_seconds

    def tokens() -> Iterator[Token]:
        nonlocal seconds
        for step in answer.steps:
            seconds += step.seconds
            for i, token in enumerate(step.tokens):
                yield Token(token, drafted=i < step.accepted)

    for text, drafted in pieces(tokens(), tokenizer):
        yield seconds, text, drafted


def frame(runners: list[Runner], now: float, console: Console, lines: int = 0) -> Table:
    """The last `lines` (0 is all) of each answer after `now` seconds, and finished ones' speeds."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_footer=True)
    width = console.width // len(runners) - 3  # between columns
    texts = []
    for runner in runners:
        speed = len(runner.generation.tokens) / runner.generation.seconds
        is_finished = now >= runner.generation.seconds
        table.add_column(runner.name, f"{speed:.1f} tokens/s" if is_finished else "", ratio=1)
        texts.append(Text("\n").join(runner.text(now).wrap(console, width)[-lines:]))
    table.add_row(*texts)
    return table
