"""Measure what training costs: python scripts/cost.py (see docs/cost.md)."""

from kangaroo.cli import cost

if __name__ == "__main__":
    cost()
