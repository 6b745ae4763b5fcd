"""The nodes of a batch of texts (tokens, words or mentions), and the attention between them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.roles.relations import Item, Level

_TOKENS = 2048  # in one batch


class Nodes:
    """The queries and keys of one level (tokens, words or mentions) in each text of a batch.

    Attributes:
        items: The texts.
        n: The number of nodes in the longest text. On the level of tokens, nodes are numbered by
            the positions of their tokens, and special tokens are not candidates.
        tokens: The tokens of each node of each text; none for a word of another piece.
    """

    def __init__(self, level: Level, items: Sequence[Item], S: int) -> None:
        self.items, self.level, self._S = items, level, S
        self.tokens = [item.nodes[level] for item in items]
        self.n = S if level == "token" else max(1, *(len(nodes) for nodes in self.tokens))

    def by_tag(self, tags: Sequence[str]) -> tuple[Int[Tensor, "B tag m"], Int[Tensor, "B n"]]:
        """The nodes with each part of speech, padded with −1, and the part of speech of each."""
        number = {tag: column for column, tag in enumerate(tags)}
        tag_of_node = torch.full((len(self.items), self.n), -1)
        members: list[list[list[int]]] = []
        for row, item in enumerate(self.items):
            of_tag: list[list[int]] = [[] for _ in tags]
            for word, tag in enumerate(item.tags):
                nodes = [word] if self.level == "word" else item.nodes["word"][word]
                if tag in number:
                    of_tag[number[tag]] += nodes
                    tag_of_node[row, list(nodes)] = number[tag]
            members.append(of_tag)
        most = max((len(nodes) for of_tag in members for nodes in of_tag), default=0)
        padded = [[nodes + [-1] * (most - len(nodes)) for nodes in of_tag] for of_tag in members]
        columns = torch.tensor(padded, dtype=torch.int64).view(len(self.items), len(tags), most)
        # At least one column, to reduce over.
        return torch.nn.functional.pad(columns, (0, 1), value=-1), tag_of_node

    @cached_property
    def excluded(self) -> Bool[Tensor, "B #n n"]:
        """Which nodes are not candidates: missing ones, and a word's or mention's own tokens."""
        members = torch.zeros(len(self.tokens), self.n, self._S)
        for text, nodes in enumerate(self.tokens):
            for node, tokens in enumerate(nodes):
                members[text, tokens[0] if self.level == "token" else node, list(tokens)] = 1.0
        missing = (members.sum(-1) == 0)[:, None]
        return missing if self.level == "token" else missing | (members @ members.mT > 0)

    def fold(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        """The attention between nodes: mean over the tokens of a query, sum over those of a key.

        A mention that is a key takes the maximum over its tokens instead, because a sum would
        favour long names.

        Source:
            Clark et al. 2019, section 4.1.
        """
        if self.level == "token":
            return weights
        (B, h, T, _), n = weights.shape, self.n
        text, node, token = (part.to(weights.device) for part in self._entries)
        into = text * n + node
        columns = weights.permute(0, 3, 1, 2)[text, token]  # K h T
        keys = columns.new_zeros(B * n, h, T)
        if self.level == "word":
            keys.index_add_(0, into, columns)
        else:
            keys.scatter_reduce_(0, into[:, None, None].expand_as(columns), columns, "amax")
        rows = keys.view(B, n, h, T).permute(0, 3, 2, 1)[text, token]  # K h n
        size = torch.bincount(into, minlength=B * n).clamp(min=1)
        total = rows.new_zeros(B * n, h, n).index_add_(0, into, rows)
        return (total / size[:, None, None]).view(B, n, h, n).transpose(1, 2)

    @cached_property
    def _entries(self) -> tuple[Tensor, ...]:
        """The text, the node and the token of each token of each node."""
        entries = [
            (text, node, token)
            for text, nodes in enumerate(self.tokens)
            for node, tokens in enumerate(nodes)
            for token in tokens
        ]
        return torch.tensor(entries, dtype=torch.int64).reshape(-1, 3).unbind(1)


def rows_of_batches(items: Sequence[Item], most: int) -> list[list[int]]:
    """Group at most `most` items of about equal length, so that there is little padding."""
    order = sorted(range(len(items)), key=lambda index: len(items[index].ids))
    batches: list[list[int]] = []
    for index in order:
        size = len(batches[-1]) + 1 if batches else 0
        if not batches or size > most or size * len(items[index].ids) > _TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches
