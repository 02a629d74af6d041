"""`kangaroo COMMAND ...` or `python -m kangaroo ...`: what a checkout's scripts do, anywhere."""

import sys
from difflib import get_close_matches

COMMANDS = {
    "chat": "talk to a model in the terminal",
    "serve": "answer requests of OpenAI's API, many at a time",
    "evaluate": "measure a drafter on a bench; with -m, several side by side",
    "tune": "find the fastest drafter for a model, and its settings",
    "speed": "time decoding against the memory's limit",
    "train": "let a model write its data, and train adapters on it; say first what that takes",
    "make_data": "write training data, which is the first part of train",
    "convert import": "turn a published adapter or head into an adapter of this project",
    "convert export": "write an adapter for other software",
    "convert pack": "write an adapter with its model card as a repository for the hub",
    "prepare datastore": "make documents searchable, for drafters that look things up",
    "prepare layers": "search the layers that a draft may skip",
    "prepare split": "split questions into some to learn from and some to measure on",
}


def main(script: str = "") -> None:
    """Run the command that the first words name; the other words are its arguments. The name of a
    `script` such as `convert.py` stands for the first word."""
    words = [*script.split(), *sys.argv[1:]]
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        lines = [f"  {n:17}  {what}\n" for n, what in COMMANDS.items() if n.startswith(script)]
        sys.stdout.write(f"usage: kangaroo COMMAND [option=value ...]\n\n{''.join(lines)}")
        sys.stdout.write("\n`kangaroo COMMAND --help` lists a command's options.\n")
        return
    count = 2 if any(command.startswith(f"{words[0]} ") for command in COMMANDS) else 1
    name = " ".join(words[:count])
    if name not in COMMANDS:
        last_words = {command.split()[-1]: command for command in COMMANDS}
        near = get_close_matches(name.split()[-1], last_words, n=1)
        hint = f"Did you mean '{last_words[near[0]]}'? " if near else ""
        raise SystemExit(f"there is no command '{name}'. {hint}`kangaroo --help` lists them all.")
    from kangaroo.cli import commands  # here, since importing it takes seconds

    program = f"{sys.argv[0]} {words[1]}" if script else f"kangaroo {name}"
    sys.argv = [program, *words[count:]]  # for Hydra, and for the provenance of results
    getattr(commands, name.replace(" ", "_"))()


if __name__ == "__main__":
    main()
