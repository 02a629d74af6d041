"""The commands; with `schema.py`, their types, `command.py` alone knows Hydra."""
