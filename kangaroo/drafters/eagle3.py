"""EAGLE-3: a layer on embeddings and three of the target's states, with EAGLE-2's dynamic tree."""

from dataclasses import dataclass
from typing import ClassVar

from kangaroo.drafters.eagle import EagleConfig
from kangaroo.heads.base import HeadConfig
from kangaroo.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from kangaroo.heads.layer import Layer
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class Eagle3Config(EagleConfig):
    """EAGLE-3 (arXiv 2503.01840) with the sizes of its released code; otherwise as `EagleConfig`.

    Args:
        adapter: folder or hub id of a trained head (`python train.py adapter=eagle3`), or an
            imported one (`python scripts/convert.py import`).
        steps: the tree's depth (the released code's `depth`, which counts from 0, is 7).
    """

    name: str = "eagle3"
    steps: DraftSize = 8
    top_k: Count = 10
    nodes: DraftSize = 59

    layer_type: ClassVar[type[Layer]] = Eagle3Head
    layer_config: ClassVar[type[HeadConfig]] = Eagle3HeadConfig
