"""Kangaroo's engine as a method of Spec-Bench; copy this file into its folder `evaluation/`.

    python -m evaluation.inference_kangaroo --model-id NAME --bench-name spec_bench \
        model=vicuna-7b drafter=kangaroo drafter.adapter=FOLDER-OR-HUB-ID

Options with dashes are those of Spec-Bench's other methods; the others are those of `evaluate.py`
for the model and the drafter, `vanilla` included.
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
    """Decode one turn for Spec-Bench's `run_eval`.

    Returns prompt and answer as ids `[1, T]`; the number of new tokens, EOS included; the number of
    forward passes of the target, prefill included; and for each pass the accepted draft tokens plus
    1, so 1 for the prefill. Their sum is the number of new tokens, or one more where an EOS or the
    limit cut off the bonus token. Errors: `KangarooError`, also for torch's errors: for a
    `RuntimeError`, `run_eval` would write "ERROR" with the previous turn's time, and continue."""
    prompt: list[int] = inputs.input_ids[0].tolist()
    room = max(1, engine.lm.context - len(prompt))
    # the seed that run_eval has set: the text depends on it alone, not on what was drawn before
    seed, sampling = torch.initial_seed(), Sampling(temperature=temperature)
    try:
        (generation,) = engine.generate([prompt], min(max_new_tokens, room), sampling, seeds=[seed])
    except RuntimeError as error:
        raise KangarooError(f"decoding failed: {error}") from error
    output_ids = torch.tensor([prompt + generation.tokens], device=inputs.input_ids.device)
    accept_lengths = [step.accepted + 1 for step in generation.steps]
    return output_ids, len(generation.tokens), len(generation.steps), accept_lengths


def load_engine(options: list[str]) -> tuple[Engine, PreTrainedTokenizerBase]:
    """The engine for these options of `evaluate.py`, and the target's tokenizer."""
    with initialize_config_dir(commands.schema.CONFIGS, version_base="1.3"):
        config: Any = compose("evaluate", commands.schema.select_models(options))
    lm, tokenizer = load_target(OmegaConf.to_object(config.model))
    return Engine(lm, OmegaConf.to_object(config.drafter).build(lm)), tokenizer


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
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
    args = parse_arguments()
    model_options = {"model.path": args.model_path, "model.dtype": args.dtype}
    options = [*args.options, *(f"{k}={value}" for k, value in model_options.items() if value)]
    engine, tokenizer = load_engine(options)
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
