"""Runs llama.cpp's server, and times its texts.

Texts are streamed by HTTP, so that decoding is timed from outside, from the first token to the
last, as for all methods. (llama.cpp's own timing agrees within a few parts in a thousand.)
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import torch

from kangaroo.engine.clock import running
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.utils.errors import ProcessLost

PROCESS = Path(__file__).with_name("process.py")
TIMEOUT = 600  # seconds to wait for the next token


@contextmanager
def server(
    gguf: Path, context: int, binary: str | None = None, flags: Sequence[str] = ()
) -> Iterator[str]:
    """Host and port of a llama.cpp that has loaded the file, with our number of threads: of the
    package xllamacpp, or of the program `binary` (llama-server) with further options. It is idle
    between requests. Errors: `ProcessLost` where it does not start."""
    threads, pipe = str(torch.get_num_threads()), subprocess.PIPE
    command = [sys.executable, str(PROCESS), str(gguf), threads, str(context)]
    if binary is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [binary, "-m", str(gguf), "-t", threads, "-c", str(context), "--port", port]
        command += ["-np", "1", "--cache-ram", "0", *flags]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        if binary is None:
            address = process.stdout.readline().strip()
        else:
            address = f"127.0.0.1:{port}" if is_loaded(process, port) else ""
        if not address:
            process.wait()
            errors.seek(0)
            reason = (errors.read().strip() or "no message").splitlines()[-1]
            raise ProcessLost(f"llama.cpp could not load '{gguf}': {reason}")
        try:
            yield address.removeprefix("http://")
        finally:
            process.kill()  # it needs no cleanup


def is_loaded(process: subprocess.Popen[str], port: str) -> bool:
    """Whether llama-server has loaded its file, once it has, or has ended."""
    while process.poll() is None:
        connection = HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT)
        with closing(connection), suppress(OSError):  # it does not listen yet
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        time.sleep(0.1)
    return False


def ask(address: str, prompt: list[int], new_tokens: int) -> Generation:
    """Decode greedily past any EOS. Lines are parsed after the last, to delay none. Errors:
    `ProcessLost` if the server ended or refuses."""
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
    try:
        with closing(HTTPConnection(address, timeout=TIMEOUT)) as connection:
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
    chunks = [json.loads(line.removeprefix(b"data:")) for line in lines[:-1]]  # the last sums up
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    steps = [StepRecord(tokens[:1])]
    for chunk, before, now in zip(chunks[1:], times, times[1:], strict=False):
        steps.append(StepRecord(chunk["tokens"], host_seconds=now - before))
    return Generation(tokens, steps, "length", prefill_seconds=times[0] - start)
