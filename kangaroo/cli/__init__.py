"""The commands. Only `command.py` and `schema.py`, their types, know Hydra."""
