"""llama.cpp's server in its own process: `python process.py GGUF THREADS CONTEXT`.

In one process its threads and ours would share OpenMP's pool. With more threads than cores, OpenMP
puts waiting threads to sleep sooner, which would slow both. The process prints its address, and
ends when its standard input does, so with its parent.
"""

import os
import sys

import xllamacpp  # of the extra `benchmark`


def serve(gguf: str, threads: int, context: int) -> None:
    """Serve a memory-mapped file, one text at a time, with at most `context` tokens in all."""
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # no copies of earlier texts' KV caches
    params.fit_params = False  # it would load the model twice
    params.verbosity = 1  # errors only
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # without destructors: the server's waits for open connections


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
