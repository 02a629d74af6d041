"""Our own small stand-in for Spec-Bench's `evaluation/eval.py`: the same calls, the same answer
file, and stricter. It asserts what the real one takes on trust of a `forward_func`."""

import json
from pathlib import Path

import torch

# Its options, beside which a method may have more.
OPTIONS = """
    question_begin question_end max_new_tokens num_choices num_gpus_per_model num_gpus_total
""".split()


@torch.inference_mode()
def run_eval(model, tokenizer, forward_func, model_id, question_file, answer_file, **kwargs):
    """Every question, `num_choices` times; a line of the answer file each."""
    begin, end, limit, num_choices, *gpus = (kwargs.pop(name) for name in OPTIONS)
    assert gpus[1] % gpus[0] == 0 and isinstance(model.config._name_or_path, str)
    model.eval()

    def decode(inputs):
        random = torch.get_rng_state()
        try:
            output = forward_func(inputs, model, tokenizer, limit, **kwargs)
        except RuntimeError:  # as the real one does, which a method should not rely on
            raise AssertionError("a RuntimeError would be written as an answer") from None
        assert torch.equal(random, torch.get_rng_state()), "the generator of others was used"
        return checked(output, inputs, limit)

    Path(answer_file).parent.mkdir(parents=True, exist_ok=True)
    for question in map(json.loads, Path(question_file).read_text().splitlines()[begin:end]):
        choices = []
        for index in range(num_choices):
            torch.manual_seed(index)
            choices.append({"index": index} | answers(question["turns"], tokenizer, decode))
        about = {name: question[name] for name in ("question_id", "category")}
        line = about | {"answer_id": "x", "model_id": model_id, "choices": choices}
        with Path(answer_file).open("a") as file:
            file.write(json.dumps(line) + "\n")


def answers(turns, tokenizer, decode):
    """All turns of a question; the conversation goes on with the answers."""
    result = {k: [] for k in ("turns", "decoding_steps", "new_tokens", "accept_lengths")}
    messages = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        new_ids, steps, lengths = decode(tokenizer([prompt], return_tensors="pt"))
        answer = tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        result["turns"].append(answer)
        result["decoding_steps"].append(steps)
        result["new_tokens"].append(len(new_ids))
        result["accept_lengths"] += lengths
        messages.append({"role": "assistant", "content": answer})
    return result


def checked(output, inputs, max_new_tokens):
    """The new ids, the number of steps and the accept lengths of one turn, if all of them fit."""
    assert type(output) is tuple and len(output) == 4
    output_ids, new_token, idx, accept_lengths = output
    length = inputs.input_ids.shape[1]
    assert isinstance(output_ids, torch.Tensor) and output_ids.dtype == torch.int64
    assert output_ids.ndim == 2 and output_ids.shape[0] == 1
    assert output_ids.device == inputs.input_ids.device
    assert torch.equal(output_ids[:, :length], inputs.input_ids)
    assert type(new_token) is int and 1 <= new_token <= max_new_tokens
    assert output_ids.shape[1] == length + new_token
    assert type(idx) is int and type(accept_lengths) is list and idx == len(accept_lengths)
    assert all(type(count) is int and count >= 1 for count in accept_lengths)
    assert sum(accept_lengths) - new_token in (0, 1)
    return output_ids[0, length:].tolist(), idx, accept_lengths


def reorg_answer_file(answer_file):
    """Sort by question, and keep the last answer of each."""
    lines = Path(answer_file).read_text().splitlines(keepends=True)
    last = {json.loads(line)["question_id"]: line for line in lines}
    Path(answer_file).write_text("".join(last[number] for number in sorted(last)))
