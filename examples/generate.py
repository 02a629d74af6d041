"""Ask one question, several at once, and talk in two turns: python examples/generate.py"""

import argparse

import kangaroo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
parser.add_argument("--adapter", help="a folder or hub id; by default the model's own")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

# The model, and the adapter that drafts for it. The model checks every draft, so the text is the
# one that the model writes alone; it only comes faster.
model = kangaroo.load(options.model, adapter=options.adapter)

# Temperature 0, the default, always takes the likeliest token.
print(model.generate("Why is the sky blue?", max_new_tokens=options.max_new_tokens))

# A list of prompts is decoded together. The same seed writes the same texts again.
questions = ["Name three rivers in Europe.", "What is 12 times 12?"]
answers = model.generate(
    questions, max_new_tokens=options.max_new_tokens, temperature=0.8, top_p=0.95, seed=1
)
for question, answer in zip(questions, answers, strict=True):
    print(f"\n> {question}\n{answer}")

# A conversation is a list of messages. The model has no memory: each turn gets all of it.
messages = []
for question in ("What is the capital of France?", "And what is it known for?"):
    print(f"\n> {question}")
    messages.append({"role": "user", "content": question})
    answer = ""
    # its text in pieces, while it is written
    for piece in model.stream(messages, max_new_tokens=options.max_new_tokens):
        print(piece, end="", flush=True)
        answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
