"""Train an adapter: python train.py model=smollm2-135m (see docs/training.md)."""

from kangaroo.cli.commands import train

if __name__ == "__main__":
    train()
