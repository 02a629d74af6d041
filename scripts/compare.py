"""Measure finished adapters side by side: python scripts/compare.py (see docs/adapters.md)."""

from kangaroo.cli import compare

if __name__ == "__main__":
    compare()
