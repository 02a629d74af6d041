"""Make documents searchable, for drafters that look things up: scripts/build_datastore.py."""

from kangaroo.cli import build_datastore

if __name__ == "__main__":
    build_datastore()
