"""An OpenAI-compatible server: many requests at a time over one engine."""
