"""Make documents searchable, for drafters that look things up: scripts/datastore.py."""

from kangaroo.cli import datastore

if __name__ == "__main__":
    datastore()
