"""`kangaroo COMMAND ...` or `python -m kangaroo`: what the scripts of a checkout do, anywhere."""

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
    "convert import": "turn a published adapter or head into an adapter of this project",
    "convert export": "write an adapter for other software",
    "convert pack": "write an adapter with its model card as a repository for the hub",
    "prepare datastore": "make documents searchable, for drafters that look things up",
    "prepare layers": "search the layers that a draft may skip",
    "prepare split": "split questions into some to learn from and some to measure on",
}


def main(script: str = "") -> None:
    """Run the command that the first words name; a `script` such as `convert.py` gives the first
    word. The others are the command's."""
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
    from kangaroo.cli import commands  # here, since it takes seconds

    program = f"{sys.argv[0]} {words[1]}" if script else f"kangaroo {name}"
    sys.argv = [program, *words[count:]]  # which Hydra reads, and results record as their command
    getattr(commands, name.replace(" ", "_"))()


if __name__ == "__main__":
    main()
