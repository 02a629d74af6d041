"""A race in the terminal: one question, and the answers of several methods as they grow."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from kangaroo.chat import summary
from kangaroo.drafters.base import Drafter
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Token
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.streaming import pieces
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import TargetModel

FRAME_SECONDS = 1 / 30
MARGIN = 8  # lines of the terminal that hold no text of an answer
ABOUT = "Decoded in turn, shown at the measured speeds; green: drafted and accepted."


@dataclass
class Runner:
    """A method's answer; of each piece its second, its text, and whether it was drafted."""

    name: str
    generation: Generation
    pieces: list[tuple[float, str, bool]]

    def text(self, now: float) -> Text:
        """What was there after so many seconds, drafts in green."""
        there = (piece for piece in self.pieces if piece[0] <= now)
        return Text.assemble(*((text, "green" if drafted else "") for _, text, drafted in there))


def race(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Mapping[str, Drafter],
    question: str,
    max_new_tokens: int,
    sampling: Sampling,
    console: Console,
) -> None:
    """Answer a question by each drafter, then show the answers side by side at the speeds that were
    measured; into a pipe one below the other. Errors: `PromptError` for a question without room."""
    prompt = prompt_ids(tokenizer, [Message(role="user", content=question)])
    limit = min(max_new_tokens, max(1, lm.context - len(prompt)))
    runners = []
    for name, drafter in drafters.items():
        engine = Engine(lm, drafter)
        for _ in range(2):  # the first one warms up
            (answer,) = engine.generate([prompt], limit, sampling, seeds=[sampling.seed])
        runners.append(Runner(name, answer, list(timed_pieces(answer, tokenizer))))
    console.print(Text(question, style="bold"), soft_wrap=not console.is_interactive)
    end = max(runner.generation.seconds for runner in runners)
    if not console.is_interactive:
        for runner in runners:
            console.print(Text(f"\n{runner.name}: {summary(runner.generation)}"), soft_wrap=True)
            console.print(runner.text(end), soft_wrap=True)
        return
    console.print(ABOUT, style="dim", highlight=False)
    start, lines = time.perf_counter(), max(1, console.height - MARGIN)
    with Live(console=console, auto_refresh=False) as live:
        while (now := time.perf_counter() - start) < end:
            live.update(frame(runners, now, console, lines), refresh=True)
            time.sleep(FRAME_SECONDS)
        live.update(frame(runners, end, console), refresh=True)  # they stand there whole


def timed_pieces(
    answer: Generation, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[float, str, bool]]:
    """A `Runner`'s pieces, each with the end of the step that completed it."""
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
    """The answers after so many seconds, of each the last `lines` (0: all); speeds of the done."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_footer=True)
    width = console.width // len(runners) - 3  # between columns
    texts = []
    for runner in runners:
        speed = len(runner.generation.tokens) / runner.generation.seconds
        done = now >= runner.generation.seconds
        table.add_column(runner.name, f"{speed:.1f} tokens/s" if done else "", ratio=1)
        texts.append(Text("\n").join(runner.text(now).wrap(console, width)[-lines:]))
    table.add_row(*texts)
    return table
