"""Compare very many tokens with vanilla's: python scripts/soak.py (see docs/evaluation.md)."""

from kangaroo.cli import soak

if __name__ == "__main__":
    soak()
