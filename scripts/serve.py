"""Answer requests of OpenAI's API: python scripts/serve.py port=8000 (see docs/serving.md)."""

from kangaroo.cli.commands import serve

if __name__ == "__main__":
    serve()
