"""Write the training data of train.py: python scripts/make_data.py model=smollm2-135m."""

from kangaroo.cli.commands import make_data

if __name__ == "__main__":
    make_data()
