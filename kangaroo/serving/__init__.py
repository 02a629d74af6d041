"""An OpenAI-compatible server that decodes many requests at a time on one engine."""
