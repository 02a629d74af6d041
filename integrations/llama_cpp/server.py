"""A llama.cpp that answers on this machine, and how long its texts take.

A text is asked for by HTTP and streamed, so that decoding is timed from outside, from the first
token to the last, like everything else. (llama.cpp's own timing of decoding is the same to a few
parts in a thousand.)
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import torch

from kangaroo.engine.clock import running
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.utils.errors import ProcessLost

PROCESS = Path(__file__).with_name("process.py")
TIMEOUT = 600  # seconds until the next token


@contextmanager
def server(gguf: Path, context: int) -> Iterator[str]:
    """Host and port of a llama.cpp that has loaded the file, with as many threads as we have; idle
    it takes no time of a core.

    Errors: `ProcessLost` where it does not start.
    """
    command = [sys.executable, PROCESS, str(gguf), str(torch.get_num_threads()), str(context)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            process.wait()
            errors.seek(0)
            reason = (errors.read().strip() or "no message").splitlines()[-1]
            raise ProcessLost(f"llama.cpp could not load '{gguf}': {reason}")
        try:
            yield address.removeprefix("http://")
        finally:
            process.kill()  # it has nothing to put in order


def ask(address: str, prompt: list[int], new_tokens: int) -> Generation:
    """Greedy decoding past any EOS. Lines are noted as they come and read when all are there.

    Errors: `ProcessLost` where the server has ended, or refuses.
    """
    request = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0,
        "samplers": ["temperature"],  # those beside it would only take time
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    marks, lines = [], []
    connection = HTTPConnection(address, timeout=TIMEOUT)
    try:
        start = running()
        connection.request("POST", "/completion", json.dumps(request))
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
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    steps = [StepRecord(tokens[:1], 0, 0, 0.0, 0.0)]
    for chunk, before, mark in zip(chunks[1:], marks, marks[1:], strict=False):
        steps.append(StepRecord(chunk["tokens"], 0, 0, 0.0, 0.0, host_seconds=mark - before))
    return Generation(tokens, steps, "length", prefill_seconds=marks[0] - start)
