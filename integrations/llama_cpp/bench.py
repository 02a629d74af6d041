"""Compares our decoding with llama.cpp's on the same prompts, in turn, in a Markdown table.

Greedy, at batch 1, with equal numbers of threads. llama.cpp has the same weights in the same number
format; for the embedded model also the 4-bit file that the weights come from.
"""

import argparse
from contextlib import ExitStack
from functools import partial

import numpy as np
from gguf_file import FORMATS, gguf_file
from server import ask, server

from kangaroo.api import drafter_config, load_target, model_config
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation
from kangaroo.evaluation.bench import BenchConfig, question_prompts
from kangaroo.evaluation.metrics import Results, estimate
from kangaroo.evaluation.speed import Texts, take_turns, write_by_engine
from kangaroo.models.embedded import EMBEDDED, embedded_gguf
from kangaroo.utils import tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name of configs/model")
    parser.add_argument("--questions", help="a file in Spec-Bench's format; else the demo bench")
    parser.add_argument("--prompts", type=int, default=12, help="spread over the questions")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--drafter", default="hybrid", help="a name of configs/drafter")
    parser.add_argument("--llama-server", help="a program that was built here, not xllamacpp")
    options = parser.parse_args()
    config = model_config(options.model)
    lm, tokenizer = load_target(config)
    drafter = drafter_config(options.drafter, config.name, {}).build(lm)
    bench, longest = BenchConfig(path=options.questions), lm.context - options.tokens
    prompts = question_prompts(tokenizer, options.prompts, bench, longest)
    files = {f"llama.cpp, {FORMATS.get(lm.dtype)}": gguf_file(lm)}
    if lm.name == EMBEDDED:
        files["llama.cpp, 4 bits"] = embedded_gguf()
    engines = {"vanilla": Engine(lm, Vanilla()), options.drafter: Engine(lm, drafter)}
    methods = {name: partial(write_by_engine, engine) for name, engine in engines.items()}
    with ExitStack() as processes:
        context = max(map(len, prompts)) + options.tokens
        for name, file in files.items():
            address = processes.enter_context(server(file, context, options.llama_server))
            methods[name] = partial(ask, address)
        take_turns(methods, prompts[:1], options.tokens, 1, "warm-up")
        trials = take_turns(methods, prompts, options.tokens, options.repeats, "answers")
    rows = []
    for name, texts in trials.items():
        every = [text for of_prompt in texts for text in of_prompt]
        rate = len(every) / sum(map(seconds_per_token, every))  # texts are equally long
        result = against_vanilla(trials["vanilla"], texts)
        times = tables.estimate(result["speedup"], result["speedup_ci95"], same=1.0)
        equal_texts = f"{result['equal_texts']} of {len(prompts)}"
        row = {"": name, "tokens/s": f"{rate:.1f}", "times vanilla": times}
        rows.append(row | {"vanilla's texts": equal_texts})
    print(tables.markdown(rows))


def seconds_per_token(text: Generation) -> float:
    """Decoding time per token, without the prefill."""
    steps = text.steps[1:]
    return sum(step.seconds for step in steps) / sum(len(step.tokens) for step in steps)


def against_vanilla(vanilla: Texts, method: Texts) -> Results:
    """Speedup over vanilla by each prompt's mean seconds per token, and a count of equal texts."""
    pairs = list(zip(vanilla, method, strict=True))
    seconds_P2 = [[np.mean(list(map(seconds_per_token, x))) for x in pair] for pair in pairs]
    speedup, ends = estimate(np.array(seconds_P2))
    equal = sum(a[0].tokens == b[0].tokens for a, b in pairs)
    return {"speedup": speedup, "speedup_ci95": ends, "equal_texts": equal}


if __name__ == "__main__":
    main()
