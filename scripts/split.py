"""Split questions into some to learn from and some to measure on: python scripts/split.py."""

from kangaroo.cli import split

if __name__ == "__main__":
    split()
