"""Decoding in Triton, on a CUDA device; `layers.py` is all that others import."""
