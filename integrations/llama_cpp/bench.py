"""Compares our decoding with llama.cpp's on the same prompts, in turn, in a Markdown table.

Greedy, at batch 1, with equal numbers of threads. Of a GGUF file both read the same one. Otherwise
llama.cpp has the same weights in the same number format, and for the embedded model also the 4-bit
file that the weights come from.
"""

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path

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
from kangaroo.models.gguf_file import gguf_path, is_gguf
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils import tables


def main() -> None:
    options = parsed_options()
    config = model_config(options.model)
    lm, tokenizer = load_target(config)
    bench, longest = BenchConfig(path=options.questions), lm.context - options.tokens
    prompts = question_prompts(tokenizer, options.prompts, bench, longest)
    methods = {"vanilla": partial(write_by_engine, Engine(lm, Vanilla()))}
    drafters: dict[str, dict[str, str]] = {name: {} for name in options.drafter}
    if options.draft_model:
        drafters["draft_model"] = {"model": options.draft_model}
    for name, settings in drafters.items():
        drafter = drafter_config(name, config, settings).build(lm)
        methods[name] = partial(write_by_engine, Engine(lm, drafter))
    context = max(map(len, prompts)) + options.tokens
    with ExitStack() as processes:
        for name, (file, flags) in llama_servers(config, lm, options).items():
            running = server(file, context, options.llama_server, flags)
            methods[name] = partial(ask, processes.enter_context(running))
        take_turns(methods, prompts[:1], options.tokens, 1, "warm-up")
        trials = take_turns(methods, prompts, options.tokens, options.repeats, "answers")
    print(tables.markdown(table(trials, prompts)))


def parsed_options() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what model= takes: a name, a file")
    parser.add_argument("--questions", help="a file in Spec-Bench's format; else the demo bench")
    parser.add_argument("--prompts", type=int, default=12, help="spread over the questions")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--drafter", nargs="+", default=["hybrid"], help="names of configs/drafter")
    parser.add_argument("--draft-model", help="a smaller model's GGUF file, which drafts for both")
    parser.add_argument("--llama-server", help="a program that was built here, not xllamacpp")
    parser.add_argument(
        "--speculation",
        nargs="+",
        default=[],
        help="types that llama-server speculates with, as ngram-simple, beside its plain decoding",
    )
    options = parser.parse_args()
    if (options.speculation or options.draft_model) and options.llama_server is None:
        parser.error(
            "--speculation and --draft-model need --llama-server: xllamacpp's has no such options"
        )
    return options


def llama_servers(
    config: ModelConfig, lm: TargetModel, options: argparse.Namespace
) -> dict[str, tuple[Path, list[str]]]:
    """By name, the file and the further options of each llama.cpp to compare with."""
    if is_gguf(config.path):
        files = {"the same file": gguf_path(config.path)}
    else:
        files = {FORMATS[lm.dtype]: gguf_file(lm)}
    if lm.name == EMBEDDED:
        files["4 bits"] = embedded_gguf()
    servers: dict[str, tuple[Path, list[str]]] = {}
    for name, file in files.items():
        servers[f"llama.cpp, {name}"] = (file, [])
    for kind in options.speculation:  # of the last file, which its users have
        servers[f"llama.cpp, {kind}"] = (file, ["--spec-type", kind])
    if options.draft_model:
        flags = ["--spec-type", "draft-simple", "--model-draft", options.draft_model]
        servers["llama.cpp, draft_model"] = (file, flags)
    return servers


def table(trials: dict[str, Texts], prompts: list[list[int]]) -> list[dict[str, str]]:
    """A row for each method: tokens/s of decoding, alone and over vanilla's, and of prompts."""
    rows = []
    for name, texts in trials.items():
        every = [text for of_prompt in texts for text in of_prompt]
        rate = len(every) / sum(map(seconds_per_token, every))  # texts are equally long
        result = against_vanilla(trials["vanilla"], texts)
        speedup = tables.estimate(result["speedup"], result["speedup_ci95"], same=1.0)
        prefill = sum(text.prefill_seconds for text in every)
        read = sum(len(p) * len(of_prompt) for p, of_prompt in zip(prompts, texts, strict=True))
        rows.append(
            {
                "": name,
                "tokens/s": f"{rate:.1f}",
                "times vanilla": speedup,
                "prompts, tokens/s": f"{read / prefill:.0f}",
                "vanilla's texts": f"{result['equal_texts']} of {len(prompts)}",
            }
        )
    return rows


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
