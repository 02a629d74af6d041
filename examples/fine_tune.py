"""Fine-tune a model on Python files, to see how well its adapters still draft (docs/training.md):

python examples/fine_tune.py --output outputs/fine_tuned --files FOLDER FOLDER
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

from kangaroo.models.loading import Dtype, load, model_config

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
parser.add_argument("--output", type=Path, default=Path("outputs/fine_tuned"))
parser.add_argument("--files", type=Path, nargs="+", required=True, help="folders of .py files")
parser.add_argument("--steps", type=int, default=100, help="of one sample each")
parser.add_argument("--width", type=int, default=512, help="tokens of a sample")
options = parser.parse_args()

model, tokenizer = load(replace(model_config(options.model), dtype=Dtype.float32))
files = [file for folder in options.files for file in sorted(folder.rglob("*.py"))]
ids = tokenizer("\n".join(file.read_text("utf-8", "ignore") for file in files)).input_ids
rows = [ids[i : i + options.width] for i in range(0, len(ids) - options.width, options.width)]
print(f"{len(files)} files, {len(ids)} tokens, {len(rows)} samples")

steps = TrainingArguments(
    output_dir=f"{options.output}.steps",  # where it goes on from, if it was stopped
    max_steps=options.steps,
    per_device_train_batch_size=1,
    learning_rate=1e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=10,
    save_steps=25,
    save_total_limit=1,
    report_to="none",
    seed=0,
)
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
trainer = Trainer(model.requires_grad_(), steps, default_data_collator, data)
trainer.train(resume_from_checkpoint=any(Path(steps.output_dir).glob("checkpoint-*")))
model.to(torch.bfloat16).save_pretrained(options.output)
tokenizer.save_pretrained(options.output)
print(f"{options.output} is fine-tuned")
