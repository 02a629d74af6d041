"""What the engine asks of a drafter.

Shapes: B rows of the batch, T tokens of a prefill chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor
from typing_extensions import Self

from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.engine.tree import Draft, Nodes, Tree, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import HeadConfig
from kangaroo.heads.draft_head import ROOM, DraftHead, TextHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch
from kangaroo.utils.ranges import AUTO, AutoThreshold, Count, CountOrZero, DraftSize, Ranged

State = TypeVar("State")
# The chance of a token that was looked up, where those before it are right. The first may be wrong
# more often, which the budget counts.
LOOKED_UP = 0.8


class Drafter(Protocol):
    """Proposes tokens; it never decides what is written. Those that inherit from it keep nothing
    between steps, and read no hidden state, unless they say otherwise.

    Args:
        taps: target hidden states it wants back, by the number of layers below them.
        max_nodes: the most nodes of a round, the root aside: as many slots are kept for them, and
            for places before the start of a text (`TargetModel.forward_meta`, `below`).
        supports_prefix_reuse: whether a prompt may come to `prefill` without a beginning that the
            row's text before it had, too, up to its last two tokens, or that `copy_prefix` named.
        needs_costs: whether it asks the budget also where a text is decoded alone.
    """

    max_nodes: int
    taps: tuple[int, ...] = ()
    supports_prefix_reuse: bool = True
    needs_costs: bool = False

    def begin(self, batch: Batch) -> None:
        """A new batch: make what is kept for each row."""
        return

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        """A prompt that enters a row begins with so many tokens of another row's text, whose keys
        the target's cache has in both now. Those that are kept here may be copied likewise."""
        return

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        """A chunk of a row's prompt has entered the target's cache; chunks come in order. The token
        after the prompt is pending, and in none of them."""
        return

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """A draft below each row's pending token."""

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        """What became of the draft, after it was committed."""
        return


@dataclass
class DrafterConfig(Ranged, ABC):
    """The settings of a drafter; a subclass adds its own, and `build`. `name` is what results and
    the command line call it."""

    name: str = "???"

    @abstractmethod
    def build(self, lm: TargetModel) -> Drafter:
        """The drafter for this target."""

    @property
    def trained(self) -> str | None:
        """The folder or hub id of what was trained for the target; None where nothing was."""
        return None

    def settings(self) -> dict[str, Any]:
        """All that fixes what the drafter proposes, so that unlike runs are not mixed up."""
        weights = {"weights": adapter_files.weights_hash(self.trained)} if self.trained else {}
        return asdict(self) | weights

    def made_by(self) -> dict[str, Any]:
        """What training the drafter for its target took, by name: `trained_positions` that entered
        the loss, all epochs together, `epochs`; empty where it was not trained."""
        return adapter_files.made_by(self.trained) if self.trained else {}


@dataclass
class ChainConfig(DrafterConfig):
    """Of a drafter of chains that may stop early.

    Args:
        steps: at most this many draft tokens in a row (gamma, d or K in papers).
        threshold: stop drafting once confidence, the top-1 probability, falls to this (Kangaroo's
            eta); 0 never stops early, `auto` once a further token would not pay, by what it costs
            on this device and how often such tokens were right in this text.
    """

    steps: DraftSize = 6
    threshold: AutoThreshold = AUTO


@dataclass
class TrainedConfig(DrafterConfig):
    """Of a drafter that was trained for its target; `adapter` is a folder or a hub id."""

    adapter: str = "???"

    @abstractmethod
    def load(self, lm: TargetModel) -> tuple[Any, list[DraftHead]]:
        """What was trained, and the heads that it drafts with. Errors: as `adapter_files.load`."""

    @abstractmethod
    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Drafter:
        """The drafter of what `load` returns."""

    @classmethod
    @abstractmethod
    def chain(cls, steps: int) -> Self:
        """Settings that draft a chain of so many tokens in every round, or as long as it can."""

    def build(self, lm: TargetModel) -> Drafter:
        return self.of(lm, *self.load(lm))

    @property
    def trained(self) -> str | None:
        return self.adapter


@dataclass
class EarlyExitConfig(ChainConfig, TrainedConfig):
    """A layer that drafts.

    Args:
        adapter: folder or hub id of the adapter; `untrained:` and an exit layer is one that drafts
            nonsense in as much time as a trained one.
        exit_layer: refuse an adapter of another exit layer; null takes the adapter's own.
        vocabulary: draft from this many of the most frequent tokens alone, so that a draft step
            reads that part of the head (FR-Spec, arXiv 2502.14856); 0 is all, null takes what the
            adapter was saved with, which may be fewer beside a text's own.
        text_vocabulary: draft from up to so many other tokens too, those of the text itself; 0 is
            none. Not where an adapter has a head of its own.
        attention_window: how far the adapter's attention looks back; null is as it was trained.
    """

    exit_layer: Count | None = None
    vocabulary: CountOrZero | None = None
    text_vocabulary: CountOrZero = ROOM
    attention_window: CountOrZero | None = None

    kind: ClassVar[type[Layer]] = Adapter  # what it drafts with
    parts: ClassVar[type[HeadConfig]] = AdapterHeadConfig  # of an untrained one

    @classmethod
    def chain(cls, steps: int) -> Self:
        return cls(steps=steps, threshold=0)

    def load(self, lm: TargetModel) -> tuple[Layer, list[DraftHead]]:
        if (exit_layer := self._untrained()) is None:
            config, vocabulary = adapter_files.read_config(self.adapter), self.vocabulary
            if self.exit_layer not in (None, config.exit_layer):
                raise AdapterMismatch(
                    f"adapter '{self.adapter}' was trained for exit layer {config.exit_layer}, and "
                    f"drafter.exit_layer={self.exit_layer} was asked for. Leave it unset, or pass "
                    "drafter.adapter= one of that exit layer."
                )
            if vocabulary is None and self.text_vocabulary:
                vocabulary = config.vocabulary_beside_texts
            layer, heads = adapter_files.load(self.adapter, lm, self.kind, vocabulary)
            if isinstance(head := heads[0], TextHead):
                head.make_room(self.text_vocabulary)
        else:
            begun = self.parts().build(lm, exit_layer, None).start_from(lm)
            assert isinstance(begun, self.kind)
            layer = begun.to(begun.home(lm), lm.dtype).eval().requires_grad_(False)
            heads = layer.draft_heads(lm, None)
        if self.attention_window is not None:
            layer.attention_window = self.attention_window
        return layer, heads

    def _untrained(self) -> int | None:
        kind, _, layer = self.adapter.partition(":")
        return int(layer) if kind == "untrained" and layer.isdecimal() else None

    @property
    def trained(self) -> str | None:
        return self.adapter if self._untrained() is None else None


class RowStates(Generic[State]):
    """What is kept of each row's text, made anew by `make` where another text has taken the row."""

    def __init__(self, make: Callable[[int, list[int]], State]):
        self._make, self._rows = make, dict[int, tuple[list[int], State]]()

    def of(self, row: int, text: list[int]) -> State:
        if row not in self._rows or self._rows[row][0] is not text:
            self._rows[row] = text, self._make(row, text)
        return self._rows[row][1]


class EarlyStopping(Drafter):
    """Drafts step by step, at most `steps`, until more would not pay.

    Attributes:
        lm: the model that drafts, or the target where its layers draft.
        proposed: what it drafted in this round, until that is observed.
        threshold: the confidence that stops a draft; 0 for none.
        auto: whether the budget stops it.
        draft_cost: of a token of the chain, in vanilla steps.
        window: committed tokens before the pending one that a round's first pass takes again.
    """

    draft_cost: float
    window: int

    def __init__(self, lm: TargetModel, steps: int, threshold: float | str):
        self.lm, self.steps, self.max_nodes = lm, steps, steps
        self.auto = self.needs_costs = isinstance(threshold, str)
        self.threshold = 0.0 if isinstance(threshold, str) else threshold
        self.proposed: Draft | None = None

    @abstractmethod
    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        """A draft below each row's pending token, of which one may have some by its `limits`."""

    def propose(self, batch: Batch) -> Draft:
        limits = self.limits(batch, batch.active)
        self.proposed = self.draft(batch, limits) if (limits[:, 0] < 1).any() else None
        return self.proposed or Draft.nothing(batch.last(1))

    def limits(self, batch: Batch, rows: Sequence[int]) -> np.ndarray:
        """`Budget.limits` of these rows, `[B, steps]`; 1, never exceeded, of others."""
        limits = np.ones((batch.size, self.steps), np.float32)
        limits[rows] = batch.budget.limits(rows, self.steps, self.draft_cost, self.auto)
        return limits

    def chain_meta(
        self, batch: Batch, steps: int, room: int, path_B: Tensor | None = None
    ) -> ForwardMeta:
        """One block in a line: the window, the pending token, `steps` more; `room` is how many
        nodes there are to be after the pending token. Of a path it is from the slot where that
        begins."""
        tree = Tree.chain(self.window + 1 + steps, batch.length_B.device)
        start_B, use = (batch.base_B, "draft") if path_B is None else (path_B, "path")
        below = 0 if min(batch.lengths) > self.window else self.window
        place = start_B - self.window, batch.used + room, batch.n_slots, below
        return self.lm.forward_meta(tree, *place, (use, batch.cache))

    def path_meta(self, batch: Batch, draft: Draft) -> ForwardMeta:
        """Where the accepted path of a draft lies now that it is committed, in a line from its root
        on, and the window before it: for a cache that has to follow what another drafted."""
        assert draft.meta is not None
        depth, root_B = draft.tree.max_depth, draft.meta.slots_RT[:, 0]
        return self.chain_meta(batch, depth, depth + 1, root_B)


class TreesFromText(Drafter):
    """Drafts by reading the text alone, on the host."""

    @abstractmethod
    def tree_of(self, batch: Batch, row: int) -> Nodes:
        """Below the pending token of a row that is not done."""

    def propose(self, batch: Batch) -> Draft:
        return Draft.listed(batch.last(1), {row: self.tree_of(batch, row) for row in batch.active})


class FromText(TreesFromText):
    """Drafts chains."""

    @abstractmethod
    def continuation(self, row: int, text: list[int]) -> list[int]:
        """Tokens that may follow the row's committed ones, `batch.texts[row]`; none where it finds
        none."""

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        least = batch.budget.min_chain_chances(len(batch.active), self.max_nodes)
        dear = (n for n, chance in enumerate(least) if chance >= LOOKED_UP**n)
        tokens = self.continuation(row, batch.texts[row])[: next(dear, self.max_nodes)]
        return tokens, range(len(tokens))
