"""Find the fastest drafter for a model: python scripts/tune.py (see docs/evaluation.md)."""

from kangaroo.cli.commands import tune

if __name__ == "__main__":
    tune()
