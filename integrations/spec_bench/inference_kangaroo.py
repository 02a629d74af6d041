"""Kangaroo's engine as a method of Spec-Bench: copy this file into its folder `evaluation/`.

    python -m evaluation.inference_kangaroo --model-id NAME --bench-name spec_bench \
        model=vicuna-7b drafter=kangaroo drafter.adapter=FOLDER-OR-HUB-ID

The options with dashes are those of its other methods. The others are `evaluate.py`'s, for model
and drafter: any drafter, `vanilla` too.
"""

import argparse
from typing import Any

import torch
from evaluation.eval import reorg_answer_file, run_eval
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from kangaroo.api import load_target
from kangaroo.cli import commands
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import KangarooError


def kangaroo_forward(
    inputs: BatchEncoding,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    engine: Engine,
    temperature: float = 0.0,
) -> tuple[Tensor, int, int, list[int]]:
    """One turn, as Spec-Bench's `run_eval` asks for it.

    Returns prompt and answer as ids `[1, T]`; the number of new tokens, EOS included; the number of
    forwards of the target, prefill included; and for each of these the accepted draft tokens + 1,
    so 1 for the prefill. These sum to the new tokens, or to one more where an EOS or the limit cut
    the bonus token off.

    Errors: `KangarooError`, also for what torch raises: `run_eval` catches a `RuntimeError`, writes
    "ERROR" with the time of the turn before, and goes on.
    """
    prompt: list[int] = inputs.input_ids[0].tolist()
    room = max(1, engine.lm.context - len(prompt))
    # the seed that run_eval has set: the text depends on it alone, not on what was drawn before
    seed, sampling = torch.initial_seed(), Sampling(temperature=temperature)
    try:
        (done,) = engine.generate([prompt], min(max_new_tokens, room), sampling, seeds=[seed])
    except RuntimeError as error:
        raise KangarooError(f"decoding failed: {error}") from error
    output_ids = torch.tensor([prompt + done.tokens], device=inputs.input_ids.device)
    accept_lengths = [step.accepted + 1 for step in done.steps]
    return output_ids, len(done.tokens), len(done.steps), accept_lengths


def loaded(options: list[str]) -> tuple[Engine, PreTrainedTokenizerBase]:
    """The engine that options of `evaluate.py` ask for, and the target's tokenizer."""
    with initialize_config_dir(commands.schema.CONFIGS, version_base="1.3"):
        config: Any = compose("evaluate", options)
    lm, tokenizer = load_target(OmegaConf.to_object(config.model))
    return Engine(lm, OmegaConf.to_object(config.drafter).build(lm)), tokenizer


def asked() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-id", required=True, help="names the answer file")
    parser.add_argument("--model-path", help="folder or hub id, where model= means another")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; by default the model's own")
    parser.add_argument("--bench-name", default="mt_bench")
    parser.add_argument("--question-begin", type=int)
    parser.add_argument("--question-end", type=int)
    parser.add_argument("--answer-file")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--num-choices", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("options", nargs="*", help="such as model=vicuna-7b drafter=kangaroo")
    return parser.parse_intermixed_args()


def main() -> None:
    """Answer the bench's questions, and sort the file of answers."""
    args = asked()
    given = {"model.path": args.model_path, "model.dtype": args.dtype}
    options = [*args.options, *(f"{name}={value}" for name, value in given.items() if value)]
    engine, tokenizer = loaded(options)
    folder = f"data/{args.bench_name}"
    answer_file = args.answer_file or f"{folder}/model_answer/{args.model_id}.jsonl"
    run_eval(
        model=engine.lm.hf,
        tokenizer=tokenizer,
        forward_func=kangaroo_forward,
        model_id=args.model_id,
        question_file=f"{folder}/question.jsonl",
        question_begin=args.question_begin,
        question_end=args.question_end,
        answer_file=answer_file,
        max_new_tokens=args.max_new_tokens,
        num_choices=args.num_choices,
        num_gpus_per_model=1,  # one process: the engine does not travel to others
        num_gpus_total=1,
        engine=engine,
        temperature=args.temperature,
    )
    reorg_answer_file(answer_file)


if __name__ == "__main__":
    main()
