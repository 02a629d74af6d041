"""llama.cpp as a rival: the same weights in its own engine, a 4-bit file, and its speculation.

A text is asked for by HTTP from a process on this machine and streamed, so that decoding is timed
from outside, from the first token to the last, like everything else. (llama.cpp's own timing of
decoding is the same to a few parts in a thousand.)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import torch

from kangaroo.engine.clock import running
from kangaroo.evaluation.speed import llama_process
from kangaroo.evaluation.speed.llama_file import FORMATS, check_installed, gguf_file
from kangaroo.evaluation.speed.speed_trials import Method, Trial
from kangaroo.models.embedded import EMBEDDED, embedded_gguf
from kangaroo.models.target import LM
from kangaroo.utils.errors import KangarooError, ProcessLost, UnsupportedModel

# Draft what followed the last tokens when they came before. By llama.cpp's own settings (the last
# 12 tokens, drafts of 48) it rarely finds anything in a chat, and was slower than without. Of five
# pairs these gave the most tokens a round on 12 questions of the demo bench.
LOOKUP = {"ngram": 2, "draft": 4}
TIMEOUT = 600  # seconds until the next token


def llama_rivals(
    lm: LM, context: int, processes: ExitStack
) -> tuple[dict[str, Method], dict[str, str]]:
    """Those that can be had here, by name, and why the others cannot.

    Args:
        context: the most tokens of prompt and answer.
        processes: ends them.
    """
    plain = f"llama_{FORMATS.get(lm.dtype, 'bf16')}"
    wanted: dict[str, tuple[Callable[[LM], Path], dict[str, int]]] = {
        plain: (gguf_file, {}),
        "llama_ngram": (gguf_file, LOOKUP),
        "llama_q4_1": (published, {}),
    }
    found: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    for name, (file, speculation) in wanted.items():
        try:
            check_installed()
            if lm.device.type != "cpu":
                raise UnsupportedModel("PyPI's wheel of llama.cpp computes on a CPU alone.")
            address = processes.enter_context(server(file(lm), context, **speculation))
            found[name] = partial(ask, address)
        except KangarooError as error:
            skipped[name] = str(error)
    return found, skipped


def published(lm: LM) -> Path:
    """The file that the embedded model was made from, as it was published.

    Errors: `UnsupportedModel` for another target; those of `embedded_gguf`.
    """
    if lm.name != EMBEDDED:
        raise UnsupportedModel(f"'{lm.name}' is not the embedded model, which comes as Q4_1.")
    return embedded_gguf()


@contextmanager
def server(gguf: Path, context: int, ngram: int = 0, draft: int = 0) -> Iterator[str]:
    """Host and port of a llama.cpp that has loaded the file, with as many threads as we have; idle
    it takes no time of a core.

    Errors: `ProcessLost` where it does not start.
    """
    settings = {
        "gguf": str(gguf),
        "threads": torch.get_num_threads(),
        "context": context,
        "ngram": ngram,
        "draft": draft,
    }
    command = [sys.executable, llama_process.__file__, json.dumps(settings)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=told, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            process.wait()
            told.seek(0)
            reason = (told.read().strip() or "no message").splitlines()[-1]
            raise ProcessLost(f"llama.cpp could not load '{gguf}': {reason}")
        try:
            yield address.removeprefix("http://")
        finally:
            process.kill()  # it has nothing to put in order


def ask(address: str, prompt: list[int], new_tokens: int) -> Trial:
    """Greedy decoding past any EOS. Lines are noted as they come and read when all are there.

    Errors: `ProcessLost` where the server has ended, or refuses.
    """
    wanted = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0,
        "samplers": ["temperature"],  # those beside it would only take time
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "timings_per_token": True,
        "stream": True,
    }
    marks, lines = [], []
    connection = HTTPConnection(address, timeout=TIMEOUT)
    try:
        start = running()
        connection.request("POST", "/completion", json.dumps(wanted))
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                marks.append(running())
                lines.append(line)
            elif line.strip():
                raise ProcessLost(f"llama.cpp did not answer: {line.decode().strip()}")
    except (OSError, HTTPException) as error:
        raise ProcessLost(f"llama.cpp's process has ended ({error!r}).") from error
    finally:
        connection.close()
    chunks = [json.loads(line.removeprefix(b"data:")) for line in lines[:-1]]  # the last sums up
    return Trial(
        prompt_tokens=len(prompt),
        tokens=[token for chunk in chunks for token in chunk["tokens"]],
        first_seconds=marks[0] - start,
        decode_seconds=marks[len(chunks) - 1] - marks[0],
        rounds=rounds(chunks),
    )


def rounds(chunks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(tokens written, tokens drafted) of each round after the first token.

    A chunk is a token. It tells how many were drafted and accepted up to the end of its round: a
    round that drafted shows by its first token.
    """
    drafted, accepted = 0, 0
    found: list[tuple[int, int]] = []
    at = 1
    while at < len(chunks):
        told = chunks[at]["timings"]
        now = told.get("draft_n", 0), told.get("draft_n_accepted", 0)
        written = min(1 + now[1] - accepted, len(chunks) - at)
        found.append((written, now[0] - drafted))
        drafted, accepted = now
        at += written
    return found
