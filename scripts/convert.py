"""Import, export or pack an adapter: python scripts/convert.py export to=vllm model=..."""

from kangaroo.__main__ import main

if __name__ == "__main__":
    main("convert")
