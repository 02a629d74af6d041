"""Kangaroo's drafter (arXiv 2404.18911) inside vLLM, which imports it for `custom_class`."""

from kangaroo_vllm.proposer import Kangaroo

__all__ = ["Kangaroo"]
