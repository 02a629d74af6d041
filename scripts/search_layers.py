"""Search the layers that a draft may skip; see kangaroo/drafters/layer_search.py."""

from kangaroo.cli import search_layers

if __name__ == "__main__":
    search_layers()
