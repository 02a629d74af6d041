"""Make what drafters need, or split questions: python scripts/prepare.py datastore model=..."""

from kangaroo.__main__ import main

if __name__ == "__main__":
    main("prepare")
