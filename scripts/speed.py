"""Measure decoding speed: python scripts/speed.py model=smollm2-135m (see docs/evaluation.md)."""

from kangaroo.cli.commands import speed

if __name__ == "__main__":
    speed()
