"""How near a GGUF file's logits are to those of its widened weights in float32.

Blocks are multiplied with tokens in eight bits, here and in llama.cpp. All read the same prompts;
of each token's successor we compare the likeliest one, and the Kullback-Leibler divergence from the
widened model's distribution. llama.cpp's server tells the likeliest alone.

Shapes: T tokens of a prompt, V words of the vocabulary.
"""

import argparse
from dataclasses import replace

import torch
from server import ask, server
from torch import Tensor

from kangaroo.api import load_target, model_config
from kangaroo.evaluation.bench import BenchConfig, question_prompts
from kangaroo.models.gguf_file import gguf_path
from kangaroo.models.loading import Dtype, Weights
from kangaroo.models.target import TargetModel
from kangaroo.utils import tables

QUESTIONS = 480  # of all benches, the most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file, or a name that stands for one")
    parser.add_argument("--questions", help="a file in Spec-Bench's format; else the demo bench")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--llama-server", help="a program that was built here")
    parser.add_argument("--llama-tokens", type=int, default=1000, help="it reads them one by one")
    options = parser.parse_args()
    config = model_config(options.model)
    packed, tokenizer = load_target(replace(config, weights=Weights.packed))
    widened, _ = load_target(replace(config, weights=Weights.widened, dtype=Dtype.float32))
    bench = BenchConfig(path=options.questions)
    prompts = question_prompts(tokenizer, QUESTIONS, bench, options.longest)
    divergences, choices, ours, read = [], [], [], []
    while prompts and sum(map(len, read)) < options.tokens:
        read.append(prompts.pop(0))
        wanted_TV, found_TV = (log_chances(lm, read[-1]) for lm in (widened, packed))
        divergences += (wanted_TV.exp() * (wanted_TV - found_TV)).sum(-1).tolist()
        choices.append(wanted_TV.argmax(-1).tolist())
        ours += (found_TV.argmax(-1) == wanted_TV.argmax(-1)).tolist()
    rows = [row("packed", ours, divergences)]
    if options.llama_server:
        with server(gguf_path(config.path), options.longest + 1, options.llama_server) as address:
            places = [(p, t) for p in range(len(read)) for t in range(len(read[p]))]
            theirs = [
                ask(address, read[p][: t + 1], 1, is_cached=True).tokens == [choices[p][t]]
                for p, t in places[: options.llama_tokens]
            ]
        rows += [row("llama.cpp", theirs), row("packed, the same tokens", ours[: len(theirs)])]
    print(tables.markdown(rows))


def log_chances(lm: TargetModel, prompt: list[int]) -> Tensor:
    """Of each token's successors, `[T, V]`, in float32."""
    count = len(prompt)
    tokens_1T = torch.tensor([prompt], device=lm.device)
    cache, meta = lm.new_cache(1, count), lm.chunk(0, count, 0, count)
    x_1TD, _ = lm.run(lm.embed(tokens_1T), cache, meta, range(lm.n_layers))
    return lm.logits(x_1TD)[0].float().log_softmax(-1)


def row(name: str, agree: list[bool], divergences: list[float] | None = None) -> dict[str, str]:
    """Of a table: the share of equal choices, and the mean divergence."""
    mean = f"{sum(divergences) / len(divergences):.5f}" if divergences else "-"
    share = f"{sum(agree) / len(agree):.2%} of {len(agree):,}"
    return {"": name, "the same likeliest token": share, "KL": mean}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
