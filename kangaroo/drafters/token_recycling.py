"""Token Recycling: a tree of the tokens that were likeliest after each token's last occurrence."""

from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise

from kangaroo.drafters.base import Drafter, DrafterConfig, RowStates, TreesFromText
from kangaroo.drafters.medusa import likeliest_paths
from kangaroo.engine.batch import Batch
from kangaroo.engine.tree import Nodes
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import DraftSize

# How often a successor is right, by its rank, of SmolLM2-135M in 17 of the demo's questions.
CHANCES = (0.43, 0.09, 0.07, 0.03, 0.017, 0.016, 0.013, 0.013)

Successors = dict[int, list[int]]  # after each token, the likeliest first


@dataclass
class TokenRecyclingConfig(DrafterConfig):
    """Token Recycling (arXiv 2408.08696) with a matrix for each text, at first from its prompt."""

    name: str = "token_recycling"
    nodes: DraftSize = 80  # size of the fixed tree without the pending token (80 in the paper)

    def build(self, lm: TargetModel) -> Drafter:
        return TokenRecycling(self.nodes, lm.config.vocab_size)


class TokenRecycling(TreesFromText):
    """Its matrix holds the tokens that were likeliest after a token when that was last verified. It
    has rows for tokens that occurred; the paper's has rows for the whole vocabulary."""

    def __init__(self, nodes: int = 80, vocab_size: int = 1 << 31):
        self.max_nodes = nodes
        self.top_k = min(len(CHANCES), vocab_size)

    def begin(self, batch: Batch) -> None:
        batch.likeliest = max(batch.likeliest, self.top_k)
        self.matrices = RowStates(lambda _, text: successors_in(text, self.top_k))

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        text = batch.texts[row]
        successors = self.matrices.get(row, text)
        min_chances = batch.budget.min_node_chances(len(batch.active), self.max_nodes)
        successors.update(batch.verified[row])  # what was verified since the last call
        batch.verified[row].clear()
        tokens = [text[-1]]
        parents = []
        numbers: dict[tuple[int, ...], int] = {(): 0}
        nodes = zip(static_tree(self.max_nodes), min_chances, strict=True)
        for (path, chance), min_chance in nodes:
            if chance < min_chance:
                break
            parent = numbers.get(path[:-1])
            if parent is None:
                continue
            following = successors.get(tokens[parent], ())
            if path[-1] < len(following):
                numbers[path] = len(tokens)
                tokens.append(following[path[-1]])
                parents.append(parent)
        return tokens[1:], parents


def successors_in(text: list[int], top_k: int) -> Successors:
    """The tokens that followed each token of a text, the newest first."""
    matrix: Successors = {}
    for token, following in pairwise(text):
        others = [other for other in matrix.get(token, ()) if other != following]
        matrix[token] = [following, *others[: top_k - 1]]
    return matrix


@cache
def static_tree(nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """The likeliest paths of ranks, each with the chance that all of it is right."""
    return list(islice(likeliest_paths([CHANCES] * nodes), nodes))
