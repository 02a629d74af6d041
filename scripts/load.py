"""Measure servers under load: python scripts/load.py (see docs/serving.md)."""

from kangaroo.cli import load

if __name__ == "__main__":
    load()
