"""Talk in two turns and see the text while it is written: python examples/stream.py"""

import argparse

import kangaroo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
parser.add_argument("--adapter", help="a folder or hub id; by default the model's own")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

model = kangaroo.load(options.model, adapter=options.adapter)

# A conversation is a list of messages. The model has no memory: each turn gets all of it.
messages = []
for question in ("What is the capital of France?", "And what is it known for?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    answer = ""
    for piece in model.stream(messages, max_new_tokens=options.max_new_tokens):
        print(piece, end="", flush=True)
        answer += piece
    print("\n")
    messages.append({"role": "assistant", "content": answer})
