"""Turn a checkpoint of the authors' code into an adapter."""

from kangaroo.cli import import_adapter

if __name__ == "__main__":
    import_adapter()
