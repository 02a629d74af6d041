"""Say what more text would bring: python scripts/learning_curve.py runs=FOLDER."""

from kangaroo.cli import learning_curve

if __name__ == "__main__":
    learning_curve()
