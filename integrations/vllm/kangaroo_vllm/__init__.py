"""Kangaroo's drafter (arXiv 2404.18911) inside vLLM: `"method": "custom_class"`, `"model": "kangaroo_vllm.Kangaroo"`."""

from kangaroo_vllm.proposer import Kangaroo

__all__ = ["Kangaroo"]
