"""What drafting brings inside vLLM on this machine: acceptance, equal texts, tokens per second.

Each way to draft runs in a process of its own; all are loaded first and then asked in turn, so that
a machine that slows down does so for all. Prints a Markdown table, and how near the choices were
where a text is not the one that vLLM writes without drafts.
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
    """One pass over the questions.

    Args:
        texts: token ids of each answer.
        seconds: of the whole pass.
        accepted: how often the first, the second, ... token of a draft was accepted.
    """

    texts: list[list[int]]
    seconds: float
    drafts: int
    drafted: int
    accepted: list[int]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.texts)) / self.seconds


# of each way to draft, at each number of requests at once, one for each repetition
Results = dict[str, dict[int, list[Result]]]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or hub id; the embedded model if not given")
    parser.add_argument("--kangaroo", required=True, help="folder of export.py to=vllm")
    parser.add_argument("--draft-model", help="folder of export.py to=draft_model")
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


def ways(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What may draft, by name: arguments of `vllm.LLM`."""
    steps = {"num_speculative_tokens": args.steps}
    methods: dict[str, dict[str, Any]] = {"none": {}}
    if args.draft_model:
        draft_model = {"method": "draft_model", "model": args.draft_model}
        methods["draft model"] = {"speculative_config": draft_model | steps}
    custom = steps | {"method": "custom_class", "model": "kangaroo_vllm.Kangaroo"}
    ours = {"kangaroo": args.kangaroo}
    if args.threshold is not None:
        ours["kangaroo_threshold"] = args.threshold
    for name, largest in (
        ("", {}),
        (f", up to {args.largest}", {"kangaroo_max_batch": args.largest}),
    ):
        methods[f"Kangaroo{name}"] = {
            "speculative_config": custom,
            "additional_config": ours | largest,
        }
    return methods


def answers(llm: Any, prompts: list[list[int]], tokens: int, at_once: int) -> Result:
    """Answer every prompt greedily, `at_once` of them at the same time."""
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
    """By the number of each text that is not the expected one, the tokens before they part."""
    found = {}
    for number, (own, other) in enumerate(zip(texts, expected, strict=True)):
        if own != other:
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=True))
            found[number] = [token for token, _ in shared]
    return found


def gaps(llm: Any, contexts: list[list[int]]) -> list[float]:
    """After each context, how far apart the logits of the two likeliest tokens are. Where they are
    nearly equal, half-precision arithmetic decides which one is written."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, detokenize=False)
    asked = [{"prompt_token_ids": ids} for ids in contexts]
    found = []
    for out in llm.generate(asked, params, use_tqdm=False) if asked else []:
        told = sorted(x.logprob for x in out.outputs[0].logprobs[0].values())
        found.append(told[-1] - told[-2])
    return found


def counts(llm: Any) -> tuple[list[int], list[int], list[int]]:
    """Drafts, drafted tokens, and accepted ones by position, since the engine was made."""
    found = {x.name.removeprefix("vllm:spec_decode_num_"): x for x in llm.get_metrics()}
    if "drafts" not in found:
        return [0], [0], []
    drafts, drafted = found["drafts"].value, found["draft_tokens"].value
    return [drafts], [drafted], list(found["accepted_tokens_per_pos"].values)


def serve(pipe: Connection, target: str, args: argparse.Namespace, options: dict[str, Any]) -> None:
    """A process that answers the questions when it is told how many at once, and that says of texts
    that fork, given as `forks` returns them, how near the choice was."""
    from vllm import LLM

    from kangaroo.evaluation.bench import BenchConfig, load_questions

    llm = LLM(
        target,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.at_once),
        enforce_eager=args.eager,
        enable_prefix_caching=False,  # a repetition would find its prompts there
        disable_log_stats=False,
        **options,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.turns[0]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in load_questions(BenchConfig())[: args.questions]
    ]
    answers(llm, prompts[:2], 8, 1)  # warm
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        if isinstance(asked, int):
            pipe.send(answers(llm, prompts, args.tokens, asked))
        else:
            pipe.send(gaps(llm, [prompts[number] + text for number, text in asked.items()]))


def measure(args: argparse.Namespace) -> tuple[Results, dict[str, list[float]]]:
    """Results, and of each way the `gaps` where its texts leave vLLM's own, as far as the table
    compares them."""
    from kangaroo.models.embedded import embedded_checkpoint

    target = args.target or str(embedded_checkpoint())
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, options in ways(args).items():
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, target, args, options), daemon=True)
        process.start()
        theirs.close()  # so that a process that dies is an EOFError here
        pipes[name].recv()
    results: Results = {name: {n: [] for n in args.at_once} for name in pipes}
    for _ in range(args.repeats):
        for n in args.at_once:
            for name, pipe in pipes.items():
                pipe.send(n)
                results[name][n].append(pipe.recv())
    compared = {name: passes[args.at_once[0]][0].texts for name, passes in results.items()}
    apart = {}
    for name, texts in compared.items():
        pipes["none"].send(forks(texts, compared["none"]))
        apart[name] = pipes["none"].recv()
    for pipe in pipes.values():
        pipe.send(None)
    return results, apart


def parted(apart: dict[str, list[float]]) -> str:
    """A line for each way whose texts are not all vLLM's own."""
    lines = []
    for name, found in apart.items():
        if found:
            near = ", ".join(f"{gap:.3f}" for gap in sorted(found))
            lines.append(f"{name}: where a text forks, the two likeliest logits are {near} apart")
    return "\n".join(lines) or "all texts are equal"


def table(results: Results) -> str:
    """Acceptance and equality of the first pass at the first number at once; speeds are medians."""
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
            same = sum(map(list.__eq__, first.texts, expected))
            cells[4] = f"{same} of {len(expected)}"
        cells += [f"{statistics.median(x.speed for x in passes[n]):.1f}" for n in at_once]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the process we time
    args = asked()
    settings = {
        name: x for name, x in vars(args).items() if name not in ("kangaroo", "draft_model")
    }
    results, apart = measure(args)
    print(f"{table(results)}\n\n{parted(apart)}\n\n{json.dumps(settings)}")


if __name__ == "__main__":
    main()
