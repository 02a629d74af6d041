"""Say what a training takes: python scripts/estimate.py model=vicuna-7b (see docs/cost.md)."""

from kangaroo.cli import estimate

if __name__ == "__main__":
    estimate()
