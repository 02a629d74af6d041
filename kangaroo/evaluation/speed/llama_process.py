"""llama.cpp's server, in a process of its own: `python llama_process.py SETTINGS` (in JSON).

In one process its threads and ours would share OpenMP's pool, which makes threads wait less
patiently when there are more of them than cores: both would be slower. It prints its address and
ends with its input, so with whoever started it.
"""

from __future__ import annotations

import json
import os
import sys


def serve(gguf: str, threads: int, context: int, ngram: int, draft: int) -> None:
    """Serve one model, one text at a time.

    Args:
        gguf: the model's file, which is mapped, not copied.
        context: most tokens of prompt and answer.
        ngram: speculate: draft what followed these last tokens when they came before; 0 is not to.
        draft: tokens drafted at once.
    """
    import xllamacpp  # of the extra `benchmark`

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # it would keep copies of the caches of earlier texts
    params.fit_params = False  # loads the model twice
    params.verbosity = 1  # errors
    if ngram:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = ngram
        params.speculative.ngram_simple.size_m = draft
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # no destructors: the server's own waits for connections that are still open


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
