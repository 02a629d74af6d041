"""Tensor parallelism: two processes on the CPU, each with half of the heads."""

from conftest import counted, prompts, written


def test_two_processes_draft_and_write_what_one_does(serve):
    """Over a draft vocabulary, whose rows of the head lie in both."""
    asked = {"max_tokens": 24}
    with serve(threshold=None) as llm:
        alone = written(llm, prompts(), **asked)
    with serve("half", threshold=0.5) as llm:
        assert written(llm, prompts(), **asked) == alone
        one = counted(llm)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with serve("half", threshold=0.5, **two) as llm:
        assert written(llm, prompts(), **asked) == alone
        assert counted(llm) == one
