"""`kangaroo COMMAND ...` or `python -m kangaroo`: what the scripts of a checkout do, anywhere."""

from __future__ import annotations

import sys
from difflib import get_close_matches

COMMANDS = {
    "chat": "talk to a model in the terminal",
    "serve": "answer requests of OpenAI's API, many at a time",
    "evaluate": "measure a drafter on a bench; with -m, several side by side",
    "tune": "find the fastest drafter for a model, and its settings",
    "speed": "time decoding against the memory's limit",
    "train": "let a model write its data, and train adapters on it; say first what that takes",
    "make_data": "the first part of train alone: write the data",
    "convert import": "turn a checkpoint of the authors' code into an adapter",
    "convert export": "write an adapter for other software",
    "convert push": "upload an adapter with its model card to the hub",
    "convert pull": "fetch an adapter from the hub",
    "prepare datastore": "make documents searchable, for drafters that look things up",
    "prepare layers": "search the layers that a draft may skip",
    "prepare split": "split questions into some to learn from and some to measure on",
}


def main() -> None:
    """Run the command that is named first; the rest is its own."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    if name not in {command.split()[0] for command in COMMANDS}:
        last_words = {command.split()[-1]: command for command in COMMANDS}
        near = get_close_matches(name, last_words, n=1)
        hint = f"Did you mean '{last_words[near[0]]}'? " if near else ""
        raise SystemExit(f"there is no command '{name}'. {hint}`kangaroo --help` lists them all.")
    from kangaroo import cli  # here, since it takes seconds

    sys.argv = [f"kangaroo {name}", *rest]  # what Hydra reads, and what results say they came from
    vars(cli)[name]()


def usage() -> str:
    """The commands, one a line."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}\n" for name, what in COMMANDS.items()]
    return (
        "usage: kangaroo COMMAND [option=value ...]\n\n"
        + "".join(lines)
        + "\n`kangaroo COMMAND --help` lists a command's options.\n"
    )


if __name__ == "__main__":
    main()
