"""Import, export, push or pull an adapter: python scripts/convert.py export to=vllm model=..."""

from kangaroo.cli import convert

if __name__ == "__main__":
    convert()
