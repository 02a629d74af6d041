"""Write an adapter for other software, such as the authors' code."""

from kangaroo.cli import export

if __name__ == "__main__":
    export()
