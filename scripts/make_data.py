"""Write what train.py would train on: python scripts/make_data.py model=smollm2-135m."""

from kangaroo.cli.commands import make_data

if __name__ == "__main__":
    make_data()
