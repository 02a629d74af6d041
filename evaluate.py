"""Measure a drafter: python evaluate.py drafter=kangaroo bench=demo (see docs/evaluation.md)."""

from kangaroo.cli.commands import evaluate

if __name__ == "__main__":
    evaluate()
