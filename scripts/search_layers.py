"""Search the layers that a draft may skip; see kangaroo/training/layer_search.py."""

from kangaroo.cli import search

if __name__ == "__main__":
    search()
