"""Upload an adapter with its model card to the hub."""

from kangaroo.cli import push

if __name__ == "__main__":
    push()
