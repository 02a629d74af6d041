"""llama.cpp's server, in a process of its own: `python process.py GGUF THREADS CONTEXT`.

In one process its threads and ours would share OpenMP's pool, which makes threads wait less
patiently when there are more of them than cores: both would be slower. It prints its address and
ends with its input, so with whoever started it.
"""

import os
import sys

import xllamacpp  # of the extra `benchmark`


def serve(gguf: str, threads: int, context: int) -> None:
    """Serve one model, whose file is mapped, one text at a time; `context` is the most tokens of
    prompt and answer.
    """
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # it would keep copies of the caches of earlier texts
    params.fit_params = False  # loads the model twice
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # no destructors: the server's own waits for connections that are still open


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
