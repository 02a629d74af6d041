"""Count how often what drafter=hybrid drafts from is right: python scripts/calibrate.py."""

from kangaroo.cli import calibrate

if __name__ == "__main__":
    calibrate()
