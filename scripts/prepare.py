"""Make what drafters need, or split questions: python scripts/prepare.py datastore model=..."""

from kangaroo.cli import prepare

if __name__ == "__main__":
    prepare()
