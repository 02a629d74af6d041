"""Runs llama.cpp's server, and times its texts.

Texts are streamed by HTTP, so that decoding is timed from outside, from the first token to the
last, as for all methods. (llama.cpp's own timing agrees within a few parts in a thousand.)
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
TIMEOUT = 600  # seconds to wait for the next token


@contextmanager
def server(gguf: Path, context: int) -> Iterator[str]:
    """Host and port of a llama.cpp that has loaded the file, with our number of threads. It uses no
    processor time while it is idle.

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
            process.kill()  # it needs no cleanup


def ask(address: str, prompt: list[int], new_tokens: int) -> Generation:
    """Decode greedily past any EOS. Lines are parsed after the last one, so as not to delay any.

    Errors: `ProcessLost` where the server has ended, or refuses.
    """
    request = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0,
        "samplers": ["temperature"],  # others would only take time
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    times, lines = [], []
    connection = HTTPConnection(address, timeout=TIMEOUT)
    try:
        start = running()
        connection.request("POST", "/completion", json.dumps(request))
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                times.append(running())
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
    for chunk, before, now in zip(chunks[1:], times, times[1:], strict=False):
        steps.append(StepRecord(chunk["tokens"], 0, 0, 0.0, 0.0, host_seconds=now - before))
    return Generation(tokens, steps, "length", prefill_seconds=times[0] - start)
