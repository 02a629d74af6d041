"""Measures drafting inside vLLM on this machine: acceptance, equal texts, tokens per second.

Each method runs in its own process. All are loaded first and then take turns, so that a machine
that slows down affects all. Prints a Markdown table, and where a text differs from vLLM's without
drafts, the gap between the two likeliest tokens' logits.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any


@dataclass
class Result:
    """One pass over the questions."""

    texts: list[list[int]]  # token ids of each answer
    seconds: float
    drafts: int
    drafted: int
    accepted: list[int]  # how often the first, the second, ... token of a draft was accepted

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.texts)) / self.seconds


# by method and number of concurrent requests, one result for each repetition
Results = dict[str, dict[int, list[Result]]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or hub id; the embedded model if not given")
    parser.add_argument("--kangaroo", required=True, help="folder of `convert.py export to=vllm`")
    parser.add_argument("--draft-model", help="folder of `convert.py export to=draft_model`")
    parser.add_argument("--questions", type=int, default=16, help="of the demo bench")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=3, help="tokens of a draft, at most")
    parser.add_argument("--threshold", type=float, help="the folder's if not given")
    parser.add_argument("--largest", type=int, default=2, help="batch that still drafts, by size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="do not compile: loads sooner")
    return parser.parse_args()


def drafting_methods(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arguments of `vllm.LLM` for each method, by name."""
    steps = {"num_speculative_tokens": args.steps}
    methods: dict[str, dict[str, Any]] = {"none": {}}
    if args.draft_model:
        draft_model = {"method": "draft_model", "model": args.draft_model}
        methods["draft model"] = {"speculative_config": draft_model | steps}
    custom = {
        "speculative_config": steps | {"method": "custom_class", "model": "kangaroo_vllm.Kangaroo"}
    }
    ours = {"kangaroo": args.kangaroo}
    if args.threshold is not None:
        ours["kangaroo_threshold"] = args.threshold
    limited = ours | {"kangaroo_max_batch": args.largest}
    methods["Kangaroo"] = custom | {"additional_config": ours}
    methods[f"Kangaroo, up to {args.largest}"] = custom | {"additional_config": limited}
    return methods


def answers(llm: Any, prompts: list[list[int]], tokens: int, at_once: int) -> Result:
    """Answer all prompts greedily, `at_once` at the same time."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine, texts, before = llm.llm_engine, {}, counts(llm)
    waiting = deque(enumerate(prompts))
    start = time.perf_counter()
    while len(texts) < len(prompts):
        while waiting and engine.get_num_unfinished_requests() < at_once:
            number, ids = waiting.popleft()
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        for out in engine.step():
            if out.finished:
                texts[int(out.request_id)] = list(out.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    drafts, drafted, accepted = (
        [a - b for a, b in zip(now, was, strict=True)]
        for now, was in zip(counts(llm), before, strict=True)
    )
    return Result([texts[i] for i in sorted(texts)], seconds, drafts[0], drafted[0], accepted)


def forks(texts: list[list[int]], expected: list[list[int]]) -> dict[int, list[int]]:
    """The tokens before the first difference, by the number of each text that has one."""
    prefixes = {}
    for number, (text, other) in enumerate(zip(texts, expected, strict=True)):
        if text != other:
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=True))
            prefixes[number] = [token for token, _ in shared]
    return prefixes


def gaps(llm: Any, contexts: list[list[int]]) -> list[float]:
    """The gap between the logits of the two likeliest tokens after each context. Where it is tiny,
    half-precision arithmetic decides which one is written."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in contexts]
    result = []
    for out in llm.generate(prompts, params, use_tqdm=False) if prompts else []:
        logprobs = sorted(x.logprob for x in out.outputs[0].logprobs[0].values())
        result.append(logprobs[-1] - logprobs[-2])
    return result


def counts(llm: Any) -> tuple[list[int], list[int], list[int]]:
    """The engine's numbers of drafts, of drafted tokens, and of accepted tokens by position."""
    metrics = {x.name.removeprefix("vllm:spec_decode_num_"): x for x in llm.get_metrics()}
    if "drafts" not in metrics:
        return [0], [0], []
    drafts, drafted = metrics["drafts"].value, metrics["draft_tokens"].value
    return [drafts], [drafted], list(metrics["accepted_tokens_per_pos"].values)


def serve(pipe: Connection, target: str, args: argparse.Namespace, options: dict[str, Any]) -> None:
    """The main function of a method's process. For a number it answers the questions, as many at a
    time; for prefixes of `forks` it sends the `gaps` after them."""
    from vllm import LLM

    from kangaroo.evaluation.bench import BenchConfig, load_questions
    from kangaroo.models.prompts import Message, prompt_ids

    llm = LLM(
        target,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.at_once),
        enforce_eager=args.eager,
        enable_prefix_caching=False,  # repetitions would find their prompts there
        disable_log_stats=False,
        **options,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [
        prompt_ids(tokenizer, [Message(role="user", content=question.turns[0])])
        for question in load_questions(BenchConfig())[: args.questions]
    ]
    answers(llm, prompts[:2], 8, 1)  # warm-up
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if isinstance(message, int):
            pipe.send(answers(llm, prompts, args.tokens, message))
        else:
            pipe.send(gaps(llm, [prompts[number] + text for number, text in message.items()]))


def measure(args: argparse.Namespace) -> tuple[Results, dict[str, list[float]]]:
    """All results, and by method the `gaps` where texts of the first pass differ from vLLM's."""
    from kangaroo.models.embedded import embedded_checkpoint

    target = args.target or str(embedded_checkpoint())
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, options in drafting_methods(args).items():
        pipes[name], child = context.Pipe()
        context.Process(target=serve, args=(child, target, args, options), daemon=True).start()
        child.close()  # so that the end of the process is an EOFError here
        pipes[name].recv()
    results: Results = {name: {n: [] for n in args.at_once} for name in pipes}
    for _ in range(args.repeats):
        for n in args.at_once:
            for name, pipe in pipes.items():
                pipe.send(n)
                results[name][n].append(pipe.recv())
    compared = {name: passes[args.at_once[0]][0].texts for name, passes in results.items()}
    gaps_by_method = {}
    for name, texts in compared.items():
        pipes["none"].send(forks(texts, compared["none"]))
        gaps_by_method[name] = pipes["none"].recv()
    for pipe in pipes.values():
        pipe.send(None)
    return results, gaps_by_method


def describe_gaps(gaps_by_method: dict[str, list[float]]) -> str:
    """A line for each method whose texts are not all vLLM's own."""
    lines = []
    for name, method_gaps in gaps_by_method.items():
        if method_gaps:
            near = ", ".join(f"{gap:.3f}" for gap in sorted(method_gaps))
            lines.append(f"{name}: where a text forks, the two likeliest logits are {near} apart")
    return "\n".join(lines) or "all texts are equal"


def table(results: Results) -> str:
    """Acceptance and equal texts are of the first pass at the first number; speeds are medians."""
    at_once = list(results["none"])
    expected = results["none"][at_once[0]][0].texts
    heads = ["drafts", "accepted by position", "drafted a step", "tokens a step", "equal texts"]
    heads += [f"tokens/s at {n}" for n in at_once]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, passes in results.items():
        first = passes[at_once[0]][0]
        cells = [name, "", "", "", ""]
        if first.drafts:
            cells[1] = " ".join(f"{x / first.drafts:.3f}" for x in first.accepted)
            cells[2] = f"{first.drafted / first.drafts:.2f}"
            cells[3] = f"{1 + sum(first.accepted) / first.drafts:.3f}"
            cells[4] = f"{sum(map(list.__eq__, first.texts, expected))} of {len(expected)}"
        cells += [f"{statistics.median(x.speed for x in passes[n]):.1f}" for n in at_once]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the process we time
    args = parse_arguments()
    settings = {k: x for k, x in vars(args).items() if k not in ("kangaroo", "draft_model")}
    results, gaps_by_method = measure(args)
    print(f"{table(results)}\n\n{describe_gaps(gaps_by_method)}\n\n{json.dumps(settings)}")


if __name__ == "__main__":
    main()
