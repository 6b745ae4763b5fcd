"""The pairs of every role in a batch, those that a mask allows, and what attention scores on them.

Scores are summed over cells; a cell is one text and one role.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels import HeadBlock
from headwise.roles.relations import Item, Level, Role


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
        """The nodes of each part of speech or usual keys, padded with −1, and the class of each."""
        number = {tag: column for column, tag in enumerate(tags)}
        tag_of_node = torch.full((len(self.items), self.n), -1)
        members: list[list[list[int]]] = []
        for row, item in enumerate(self.items):
            usual = item.usual_keys.get(self.level, {})
            of_tag: list[list[int]] = [list(usual.get(tag, ())) for tag in tags]
            for column, nodes in enumerate(of_tag):
                tag_of_node[row, nodes] = column
            for word, tag in enumerate(item.tags):
                of_word = [word] if self.level == "word" else [*item.nodes["word"][word]]
                if tag in number:
                    of_tag[number[tag]] += of_word
                    tag_of_node[row, of_word] = number[tag]
            members.append(of_tag)
        most = max((len(nodes) for of_tag in members for nodes in of_tag), default=0)
        padded = [[nodes + [-1] * (most - len(nodes)) for nodes in of_tag] for of_tag in members]
        columns = torch.tensor(padded, dtype=torch.int64).view(len(self.items), len(tags), most)
        # At least one column, to reduce over.
        return torch.nn.functional.pad(columns, (0, 1), value=-1), tag_of_node

    @cached_property
    def excluded(self) -> Bool[Tensor, " B #n n"]:
        """Which nodes are not candidates: missing ones, and a word's or mention's own tokens."""
        text, node, token = self._entries
        if self.level == "token":
            missing = torch.ones(len(self.tokens), 1, self.n, dtype=torch.bool)
            missing[text, 0, token] = False
            return missing
        members = torch.zeros(len(self.tokens), self.n, self._S)
        members[text, node, token] = 1.0
        return (members.sum(-1) == 0)[:, None] | (members @ members.mT > 0)

    def fold(self, weights: Float[Tensor, "B h T S"]) -> Float[Tensor, "B h n n"]:
        """The attention between nodes: mean over the tokens of a query, sum over those of a key.

        A mention that is a key takes the maximum over its tokens instead, because a sum would
        favor long names.

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


TIE = 1e-6  # values this close to the largest, as a share of it, tie with it


def right_share(
    weights: Float[np.ndarray, "*axes"], right: Bool[np.ndarray, "*#axes"], axis: int = -1
) -> Float[np.ndarray, "*other"]:
    """The share of the largest weights along an axis that are right ones: 1 or 0 without a tie."""
    top = weights >= weights.max(axis, keepdims=True) * (1 - TIE)
    return np.asarray((top & right).sum(axis) / top.sum(axis))


# A share of the attention of a query: if less than this is left for keys that are not sinks, the
# evenness over them is 0.
_LEAST_LEFT = 1e-3


class RelationIndex:
    """The queries of all roles on one level, their keys, and the pairs of tokens behind them.

    Attributes:
        nodes: The nodes that are queries and keys.
        roles: The roles, of which some are on other levels.
        n_cells: The number of cells: texts times roles.
        text: The text of each query.
        role: Its role.
        cell: Its cell.
        node: Its node.
        query: For each pair, the number of its query.
        key: For each pair, the node that is its key.
        candidates: For each candidate of a query of a role that is a choice, the number of its
            query; candidates of another piece of the text, or that share a token with the query,
            are left out.
        candidate: The node that is the candidate.
        right: Whether the candidate is a key of the query.
        token_pairs: For each pair of tokens the number of the query, the token that attends, the
            token that is attended to, and the weight of the pair in the mass of the query.
    """

    def __init__(self, nodes: Nodes, roles: Sequence[Role]) -> None:
        self.nodes, self.roles = nodes, roles
        self.n_cells = len(nodes.items) * len(roles)
        pairs = self._numbered("pairs")
        queries, self.query = torch.unique_consecutive(pairs // nodes.n, return_inverse=True)
        self.key = pairs % nodes.n
        self.cell, self.node = queries // nodes.n, queries % nodes.n
        self.text, self.role = self.cell // len(roles), self.cell % len(roles)
        candidates = self._numbered("candidates")
        candidates = candidates[torch.isin(candidates // nodes.n, queries)]
        self.candidates = torch.searchsorted(queries, candidates // nodes.n)
        self.candidate, self.right = candidates % nodes.n, torch.isin(candidates, pairs)
        self.token_pairs = self._token_pairs()

    def where(self, holds: Sequence[bool]) -> Bool[Tensor, " Q"]:
        """Which queries are of roles for which something holds."""
        return torch.tensor(holds)[self.role]

    def scored_by(self, score: str) -> Bool[Tensor, " Q"]:
        """Which queries are of roles with this score."""
        return self.where([role.score == score for role in self.roles])

    def choices_in(self, table: Float[Tensor, "B h n n"] | Bool[Tensor, "B h n n"]) -> Tensor:
        """The entry of each candidate in a table of pairs of nodes: `C h`."""
        query, other = self.node[self.candidates], self.candidate
        # Some roles have candidates that attend to the query, and not the query to them.
        incoming = self.where([role.incoming for role in self.roles])[self.candidates]
        row, column = torch.where(incoming, other, query), torch.where(incoming, query, other)
        return table[self.text[self.candidates], :, row, column]

    def hits(
        self, scores: Float[Tensor, "C h"], allowed: Bool[Tensor, "C hv"]
    ) -> Float[Tensor, "Q h"]:
        """Whether the allowed candidate with the largest score is right; ties share."""
        query, right, allowed = (
            part.to(scores.device) for part in (self.candidates, self.right[:, None], allowed)
        )
        scores = scores.masked_fill(~allowed, -torch.inf)
        lowest = scores.new_full((len(self.text), scores.shape[1]), -torch.inf)
        into = query[:, None].expand_as(scores)
        highest = lowest.scatter_reduce(0, into, scores, "amax")[query]
        tied = (allowed & (scores >= highest - highest.abs() * TIE)).to(scores)
        ties = sum_into(tied, query, len(self.text))
        return sum_into(tied * right, query, len(self.text)) / ties.clamp(min=1)

    def is_key(self, queries: Int[Tensor, " K"]) -> Bool[Tensor, "K n"]:
        """Which nodes are keys of each of some queries."""
        keys = torch.zeros(len(self.text), self.nodes.n, dtype=torch.bool)
        keys[self.query, self.key] = True
        return keys[queries]

    def _numbered(self, which: str) -> Int[Tensor, " P"]:
        """All pairs, or candidates, each as one number made of cell, query and key; sorted."""
        # As whole numbers, pairs are sorted and compared by single array operations.
        n, numbers = self.nodes.n, [np.zeros(0, dtype=np.int64)]
        for text, item in enumerate(self.nodes.items):
            has_tokens = np.array([bool(tokens) for tokens in self.nodes.tokens[text]], dtype=bool)
            for column, role in enumerate(self.roles):
                named = getattr(item, which).get(role.name, ())
                if role.level != self.nodes.level or not named:
                    continue
                pairs = np.array(named, dtype=np.int64)
                if role.level != "token":
                    pairs = pairs[has_tokens[pairs].all(1)]
                cell = text * len(self.roles) + column
                numbers.append((cell * n + pairs[:, 0]) * n + pairs[:, 1])
        return torch.from_numpy(np.unique(np.concatenate(numbers)))

    def _token_pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key = self.query, self.key
        if self.nodes.level == "token":
            return query, self.node[query], key, torch.ones(len(query))
        incoming = torch.tensor([role.incoming for role in self.roles])[self.role[query]]
        # If the candidates attend to the query, each of several right ones counts equally.
        n_keys = torch.bincount(query, minlength=len(self.text))[query]
        columns = (
            query,
            self.text[query],
            torch.where(incoming, key, self.node[query]),
            torch.where(incoming, self.node[query], key),
            torch.where(incoming, n_keys, 1),
        )
        tokens = self.nodes.tokens
        # Two keys of one query may share a token, whose attention counts once.
        entries = sorted(
            {
                (number, query_token, key_token, share * len(tokens[text][node]))
                for number, text, node, key_node, share in zip(
                    *(column.tolist() for column in columns), strict=True
                )
                for query_token in tokens[text][node]
                for key_token in tokens[text][key_node]
            }
        )
        number, query_token, key_token, size = (
            torch.tensor(entries, dtype=torch.int64).reshape(-1, 4).unbind(1)
        )
        return number, query_token, key_token, 1.0 / size


class EligiblePairs:
    """The pairs of a relation index that count under a mask, computed once for all its layers.

    A query is eligible if the mask allows one of its keys and leaves it a choice of keys. For a
    role scored by `top` the key must be a candidate as well.

    Attributes:
        visible: Which keys each query may attend to.
        candidates: Which nodes may hold the largest weight of each query.
        eligible: Which queries count, as 1 or 0.
        count: How many queries of each cell count.
        uniform: What uniform attention scores in each cell.
    """

    def __init__(self, index: RelationIndex, visible: Bool[Tensor, "B hv T S"]) -> None:
        self.index, self.visible = index, visible.cpu()
        nodes = index.nodes.fold(self.visible.float()) > 0
        self.candidates = nodes & ~index.nodes.excluded[:, None]
        text, node, query = index.text, index.node, index.query
        self._top, choice = index.scored_by("top"), index.scored_by("choice")
        pair = (text[query], slice(None), node[query], index.key)
        self._allowed = torch.where(self._top[query, None], self.candidates[pair], nodes[pair])
        has_key = sum_into(self._allowed.float(), query, len(text)) > 0
        options = torch.where(self._top[:, None, None], self.candidates[text, :, node],
                              nodes[text, :, node]).sum(-1)  # fmt: skip
        # A query decides nothing if all of its candidates are right, or all wrong.
        allowed = index.choices_in(self.candidates)  # C hv
        right, wrong = (
            sum_into((allowed & which[:, None]).float(), index.candidates, len(text)) > 0
            for which in (index.right, ~index.right)
        )
        decides = right & wrong
        self.choosable = allowed & decides[index.candidates]
        self.eligible = torch.where(
            choice[:, None], decides, has_key & (options > 1)
        ).float()  # Q hv
        self.count = sum_into(self.eligible, index.cell, index.n_cells)
        self.uniform = sum_into(self.eligible * self._chance(), index.cell, index.n_cells)

    def chance_of_top(self) -> Float[Tensor, "Q hv"]:
        """The share of a query's candidates that are its keys."""
        index, query = self.index, self.index.query
        n_candidates = self.candidates.sum(-1)[index.text, :, index.node].clamp(min=1)
        keys = self.candidates[index.text[query], :, index.node[query], index.key]
        return sum_into(keys.float(), query, len(index.text)) / n_candidates

    def _chance(self) -> Float[Tensor, "Q hv"]:
        """What uniform attention scores on each query; 1 for evenness."""
        index = self.index
        weights = self.visible / self.visible.sum(-1, keepdim=True).clamp(min=1)
        mass = self._mass_of_queries(weights, index.scored_by("mass"))
        chance = torch.where(self._top[:, None], self.chance_of_top(), mass)
        equal = torch.zeros_like(self.choosable, dtype=torch.float32)
        chosen = index.hits(equal, self.choosable)
        chance = torch.where(index.scored_by("choice")[:, None], chosen, chance)
        is_breadth = index.where([role.kind == "breadth" for role in index.roles])
        return torch.where(is_breadth[:, None], 1.0, chance)

    def _mass_of_queries(
        self, table: Float[Tensor, "B h T S"], of: Bool[Tensor, " Q"] | None = None
    ) -> Float[Tensor, "Q h"]:
        """The sum of a table of token pairs over the relation of each query, or of some alone."""
        index = self.index
        query, query_token, key_token, share = index.token_pairs
        if of is not None:
            keep = of[query]
            query, query_token, key_token, share = (
                part[keep] for part in (query, query_token, key_token, share)
            )
        entries = table[index.text[query], :, query_token, key_token]
        return sum_into(entries * share[:, None].to(table), query, len(index.text))

    def mass(self, block: HeadBlock, table: Float[Tensor, "B h T S"]) -> Float[Tensor, "cells h"]:
        """The sum of a table of token pairs over the relations, whichever score a role has."""
        return self._in_cells(self._mass_of_queries(table), block)

    def value(
        self, block: HeadBlock, evenness: Mapping[str, Float[Tensor, "B h T"]]
    ) -> Float[Tensor, "cells h"]:
        """What each head of a block scores in each cell, summed over the queries.

        Args:
            evenness: The evenness of each row, 0 to 1, by the score that it is for.
        """
        index = self.index
        scores = self._mass_of_queries(block.weights, index.scored_by("mass"))
        if self._top.any():
            scores += self._top_of_queries(block)
        if len(index.candidates):
            entries = index.choices_in(index.nodes.fold(block.weights))
            scores += index.hits(entries, _for_heads(self.choosable, block))
        for score, of_rows in evenness.items():
            query = torch.nonzero(index.scored_by(score)).flatten()
            scores[query] = of_rows[index.text[query], :, index.node[query]]
        return self._in_cells(scores, block)

    def _in_cells(self, scores: Float[Tensor, "Q h"], block: HeadBlock) -> Float[Tensor, "cells h"]:
        eligible = _for_heads(self.eligible, block).to(scores)
        return sum_into(scores * eligible, self.index.cell, self.index.n_cells)

    def _top_of_queries(self, block: HeadBlock) -> Float[Tensor, "Q h"]:
        """Whether the largest weight of a query is on the relation; weights that tie share it."""
        index, keep = self.index, self._top[self.index.query]
        query, key = index.query[keep], index.key[keep]
        text, node = index.text[query], index.node[query]
        folded = index.nodes.fold(block.weights)
        among = _for_heads(self.candidates, block).to(folded.device)
        folded = folded.masked_fill(~among, -1.0)
        tied = folded >= folded.amax(-1, keepdim=True) * (1 - TIE)
        share = tied[text, :, node, key] / tied.sum(-1)[text, :, node].clamp(min=1)
        allowed = _for_heads(self._allowed[keep], block).to(folded)
        return sum_into(share * allowed, query, len(index.text))


def sink_keys(items: Sequence[Item], S: int) -> Bool[Tensor, "B S"]:
    """The keys where attention may rest, in texts padded to `S`: first and special tokens."""
    sinks = torch.ones(len(items), S, dtype=torch.bool)
    for row, item in enumerate(items):
        sinks[row, [tokens[0] for tokens in item.nodes["token"] if tokens[0]]] = False
        sinks[row, len(item.ids) :] = False
    return sinks


def evenness_of(
    block: HeadBlock, visible: Bool[Tensor, " B #H T S"], sinks: Bool[Tensor, "B S"]
) -> dict[str, Float[Tensor, "B h T"]]:
    """The entropy of each row as a share of that of uniform attention, 0 to 1.

    Over all keys, and over those that are not sinks: a row that leaves almost no attention to them
    counts as 0.
    """
    visible = _for_heads(visible, block)
    # The positions of the sinks of each text, padded to the text with the most.
    present, positions = (
        part.to(visible.device) for part in sinks.to(torch.uint8).topk(int(sinks.sum(1).max()))
    )
    not_sinks = ~sinks[:, None, None].to(visible.device)
    n_keys, n_content = visible.sum(-1), (visible & not_sinks).sum(-1)
    shape = (*block.weights.shape[:3], positions.shape[1])
    on_sinks = block.weights.gather(3, positions[:, None, None].expand(shape))
    on_sinks = on_sinks * present[:, None, None]
    left = 1 - on_sinks.sum(-1)
    # H = Σ over sinks + left · (H of the rest) − left ln left
    content = (block.entropy + torch.special.xlogy(on_sinks, on_sinks).sum(-1)) / left
    content = (content + left.clamp(min=_LEAST_LEFT).log()) * _per_nat(n_content)
    content = torch.where(left > _LEAST_LEFT, content.clamp(0.0, 1.0), 0.0)
    return {"entropy": block.entropy * _per_nat(n_keys), "content entropy": content}


def _per_nat(n_keys: Int[Tensor, " B #h T"]) -> Float[Tensor, " B #h T"]:
    """One over the entropy of uniform attention."""
    return 1.0 / n_keys.clamp(min=2).float().log()


def _for_heads(values: Tensor, block: HeadBlock) -> Tensor:
    """The columns of the block's heads, where heads differ."""
    return values if values.shape[1] == 1 else values[:, block.heads]


def sum_into(
    values: Float[Tensor, "K h"], into: Int[Tensor, " K"], size: int
) -> Float[Tensor, "_ h"]:
    """The sums of the rows with the same number, in `size` rows."""
    return values.new_zeros(size, values.shape[1]).index_add_(0, into.to(values.device), values)
