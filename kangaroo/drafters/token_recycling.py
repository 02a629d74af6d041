"""Token Recycling: a tree of the tokens that were likeliest where each token last stood."""

from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise

from kangaroo.drafters.base import Drafter, DrafterConfig, RowStates, TreesFromText
from kangaroo.drafters.medusa import likeliest_paths
from kangaroo.engine.batch import Batch
from kangaroo.engine.tree import Nodes
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import DraftSize

# How often a successor is right, by its rank: of SmolLM2-135M on 17 of the demo's questions.
RIGHT = (0.43, 0.09, 0.07, 0.03, 0.017, 0.016, 0.013, 0.013)

Successors = dict[int, list[int]]  # of each token, the likeliest first


@dataclass
class TokenRecyclingConfig(DrafterConfig):
    """Token Recycling (arXiv 2408.08696), with a matrix for each text, which begins with the
    prompt. The static tree has so many `nodes`, the pending token aside; the paper's has 80."""

    name: str = "token_recycling"
    nodes: DraftSize = 80

    def build(self, lm: TargetModel) -> Drafter:
        return TokenRecycling(self.nodes, lm.config.vocab_size)


class TokenRecycling(TreesFromText):
    """Every verified node says what is likeliest after its token: the matrix keeps the last word.
    Rows of it are made as tokens come; the paper's holds the whole vocabulary."""

    def __init__(self, nodes: int = 80, vocab_size: int = 1 << 31):
        self.max_nodes, self.top_k = nodes, min(len(RIGHT), vocab_size)

    def begin(self, batch: Batch) -> None:
        batch.likeliest = max(batch.likeliest, self.top_k)
        self.matrices = RowStates(lambda _, text: successors_in(text, self.top_k))

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        least = batch.budget.min_node_chances(len(batch.active), self.max_nodes)
        text = batch.texts[row]
        successors = self.matrices.of(row, text)
        recycle(successors, batch, row)
        tokens, parents = [text[-1]], []
        numbers: dict[tuple[int, ...], int] = {(): 0}
        for (path, chance), needed in zip(static_tree(self.max_nodes), least, strict=True):
            if chance < needed:
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
    """Of each token of a text those that followed it, the newest first."""
    matrix: Successors = {}
    for token, after in pairwise(text):
        others = [other for other in matrix.get(token, ()) if other != after]
        matrix[token] = [after, *others[: top_k - 1]]
    return matrix


def recycle(matrix: Successors, batch: Batch, row: int) -> None:
    """Take what verification has said since."""
    matrix.update(batch.verified[row])
    batch.verified[row].clear()


@cache
def static_tree(nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """Paths of ranks and how often each is right, the likeliest first, of the tree with the most
    tokens to be expected right."""
    return list(islice(likeliest_paths([RIGHT] * nodes), nodes))
