"""A model that transformers' `generate` can use as an assistant as it is meant to."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel


def assistant(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, given a mask.

    transformers 5.23 hands its assistant no attention mask where nothing is masked. The assistant
    then takes every pad token of the text for padding, and drafts after a text without them
    (`examples/assistant_mask.py`). With a mask it sees the text as it is.
    """
    wrapped = cast(Any, model)
    generate = wrapped.generate

    def masked(*, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = torch.ones_like(input_ids)
        return generate(input_ids=input_ids, **kwargs)

    wrapped.generate = masked
    return model
