"""Fetch an adapter from the hub."""

from kangaroo.cli import pull

if __name__ == "__main__":
    pull()
