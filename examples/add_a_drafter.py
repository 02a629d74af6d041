"""A drafter of your own in one screen: python examples/add_a_drafter.py

It guesses that the text goes on as it did after the last two tokens stood there before. A wrong
guess costs time, never the text: the model checks each one. See docs/add-a-drafter.md.
"""

import argparse
from dataclasses import dataclass

import kangaroo
from kangaroo.drafters.base import DrafterConfig, FromText
from kangaroo.drafters.vanilla import VanillaConfig

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
options = parser.parse_args()


@dataclass
class EchoConfig(DrafterConfig):
    name: str = "echo"
    steps: int = 4  # at most this many tokens in a draft

    def build(self, lm):
        return Echo(self.steps)


class Echo(FromText):  # it reads the text alone; other drafters read the model's hidden states too
    def __init__(self, steps):
        self.max_nodes = steps

    def continuation(self, row, text):
        """Tokens that may follow; none if nothing was found."""
        for start in range(len(text) - 3, -1, -1):
            if text[start : start + 2] == text[-2:]:
                return text[start + 2 : start + 2 + self.max_nodes]
        return []


question = "Write a Python function for each of: add, subtract, multiply."
echo = kangaroo.load(options.model, drafter=EchoConfig(steps=6))
vanilla = kangaroo.load(options.model, drafter=VanillaConfig())  # drafts nothing
text = echo.generate(question, max_new_tokens=64)
print(text)
print("vanilla decoding writes the same:", text == vanilla.generate(question, max_new_tokens=64))
