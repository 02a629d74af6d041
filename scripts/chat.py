"""Talk to a model in the terminal: python scripts/chat.py model=smollm2-135m drafter=kangaroo."""

from kangaroo.cli.commands import chat

if __name__ == "__main__":
    chat()
