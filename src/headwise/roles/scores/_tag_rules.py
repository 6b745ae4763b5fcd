"""Rules that name a word by parts of speech and order alone, fitted to each role.

Such a rule needs no parse: it names the nearest or the second nearest word on one side whose part
of speech belongs to a set. The sets are grown greedily, on the queries that a caller selects.
Where no text has parts of speech, the usual keys of each relation stand in for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

from headwise.roles.scores._eligible import EligiblePairs
from headwise.roles.scores._heuristics import at_offsets

FAR = 2**14  # the distance to a word that does not exist; it fits into 16 bits
SIDES = ("to the left", "to the right", "to the left or itself")
_RANKS = ("nearest", "second nearest")
_OWN = "its own class"
_LEAST_GAIN = 1e-6  # of a sum over queries: a part of speech that only ties is not added


@dataclass(frozen=True)
class TagRows:
    """The nearest words of every part of speech, for each query of a structural role.

    Attributes:
        item: The text of the query.
        role: Its role.
        tag: Its part of speech; −1 without one.
        chance: What a random candidate scores.
        distance: How far the nearest and the second nearest word are, on each side; `FAR` for
            none.
        right: Whether that word is a key.
        offsets: What each fixed offset scores.
    """

    item: Int[np.ndarray, " Q"]
    role: Int[np.ndarray, " Q"]
    tag: Int[np.ndarray, " Q"]
    chance: Float[np.ndarray, " Q"]
    distance: Int16[np.ndarray, "Q side rank tag"]
    right: Bool[np.ndarray, "Q side rank tag"]
    offsets: Float[np.ndarray, "Q K"]

    @classmethod
    def joined(cls, parts: Sequence["TagRows"]) -> "TagRows":
        return cls(
            *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls))
        )

    def take(self, rows: np.ndarray) -> "TagRows":
        return TagRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def with_own_class(self) -> "TagRows":
        """The same with one more part of speech: whichever the query has."""
        own = self.tag[:, None, None, None]
        distance = np.take_along_axis(self.distance, own, -1)
        right = np.take_along_axis(self.right, own, -1) & (own >= 0)
        distance[self.tag < 0] = FAR
        return replace(
            self,
            distance=np.concatenate([self.distance, distance], -1),
            right=np.concatenate([self.right, right], -1),
        )


def tag_rows(eligible: EligiblePairs, tags: Sequence[str]) -> TagRows:
    """The nearest words of every part of speech for the eligible queries of structural roles.

    On the level of tokens a word is named by the last of its tokens on the left, by the first on
    the right, and the query's own word may be named as well.
    """
    index, nodes = eligible.index, eligible.index.nodes
    n = nodes.n
    structural = index.where([role.kind == "structure" for role in index.roles])
    rows = torch.nonzero(structural & (eligible.eligible[:, 0] > 0)).flatten()
    # Roles share their queries: what is nearest is found once for each word that asks.
    place, of_row = torch.unique(index.text[rows] * n + index.node[rows], return_inverse=True)
    text, node = place // n, place % n
    members, tag_of_node = nodes.by_tag(tags)
    columns = members[text]  # U tag m
    allowed = eligible.candidates[text, 0, node].gather(1, columns.clamp(min=0).flatten(1))
    allowed = allowed.view(columns.shape) & (columns >= 0)
    step = columns - node[:, None, None]
    sides = [(step < 0, -1), (step > 0, 1), ((step <= 0) & (nodes.level == "token"), -1)]
    assert len(sides) == len(SIDES)
    is_key, distances, rights = index.is_key(rows), [], []
    for inside, sign in sides:
        near = _two_nearest(torch.where(allowed & inside, sign * step, FAR))[of_row]
        key = (index.node[rows, None, None] + sign * near).clamp(0, n - 1)
        right = is_key.gather(1, key.flatten(1)).view(near.shape) & (near < FAR)
        distances.append(near)
        rights.append(right)
    return TagRows(
        item=index.text[rows].numpy(),
        role=index.role[rows].numpy(),
        tag=tag_of_node[index.text[rows], index.node[rows]].numpy(),
        chance=eligible.chance_of_top()[rows, 0].numpy(),
        distance=torch.stack(distances, 1).numpy().astype(np.int16),
        right=torch.stack(rights, 1).numpy(),
        offsets=at_offsets(eligible, rows).numpy(),
    )


def _two_nearest(distance: Int[Tensor, "U tag m"]) -> Int[Tensor, "U 2 tag"]:
    nearest = distance.amin(-1)
    others = torch.where(distance == nearest[..., None], FAR, distance)
    return torch.stack([nearest, others.amin(-1)], 1)


# A rule fitted to each role: its name for each, and what it scores on every query.
TagRule = tuple[list[str], Float[np.ndarray, " Q"]]


def fit_tag_rules(
    rows: TagRows, selected: Bool[np.ndarray, " Q"], tags: Sequence[str], n_roles: int
) -> dict[str, TagRule]:
    """Fit the best rules of three kinds to the selected queries of each role.

    `class` names the nearest word of one part of speech. `set` names the nearest or second nearest
    word of a set, which may include the query's own class. `by class` has such a rule, or a fixed
    offset, for each part of speech of the query.
    """
    wider = rows.with_own_class()
    names = [*tags, _OWN]
    single = _fit(rows, selected, rows.role, ranks=1, most=1)
    chosen = _fit(wider, selected, rows.role)
    group = rows.role * (len(tags) + 1) + rows.tag + 1
    by_class = _fit(rows, selected, group, with_offsets=True)
    rules = {
        "class": (_rule_names(single, tags, n_roles), _rule_values(single, rows, rows.role)),
        "set": (_rule_names(chosen, names, n_roles), _rule_values(chosen, wider, rows.role)),
    }
    # A class that no selected query has gets no rule of its own.
    known = np.isin(group, by_class["groups"])
    value = np.where(known, _rule_values(by_class, rows, group), rules["set"][1])
    rules["by class"] = ["a rule for each class of the query"] * n_roles, value
    return rules


# The best rule of each group of queries, as arrays over the groups: their numbers (`groups`);
# the `side` on which the rule looks; whether it names the nearest word (`rank` 0) or the second
# nearest (1); the parts of speech that it considers (`sets`); the index of the `offset` that is
# better, −1 for none.
_Fitted = dict[str, np.ndarray]


def _rule_names(fitted: _Fitted, tags: Sequence[str], n_roles: int) -> list[str]:
    names = [""] * n_roles
    for row, role in enumerate(fitted["groups"].tolist()):
        chosen = "/".join(tag for tag, has in zip(tags, fitted["sets"][row], strict=True) if has)
        side, rank = SIDES[fitted["side"][row]], _RANKS[fitted["rank"][row]]
        names[role] = f"{rank} {chosen} {side}"
    return names


def _rule_values(
    fitted: _Fitted, rows: TagRows, group: Int[np.ndarray, " Q"]
) -> Float[np.ndarray, " Q"]:
    """What the rule of its group scores on every query; an unknown group gets another's."""
    groups = fitted["groups"]
    if not len(groups):
        return rows.chance
    rule = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    query, side = np.arange(len(group)), fitted["side"][rule]
    inside = fitted["sets"][rule][:, None]
    distance = np.where(inside, rows.distance[query, side], FAR).reshape(len(group), -1)
    right = rows.right[query, side].reshape(len(group), -1)
    nearest = distance.min(-1, keepdims=True)
    second = fitted["rank"][rule] == 1
    distance = np.where(second[:, None] & (distance == nearest), FAR, distance)
    named = distance.argmin(-1)
    exists = distance[query, named] < FAR
    value = np.where(exists, right[query, named], rows.chance)
    offset = fitted["offset"][rule]
    return np.where(offset >= 0, rows.offsets[query, offset], value)


def _fit(
    rows: TagRows,
    selected: Bool[np.ndarray, " Q"],
    group: Int[np.ndarray, " Q"],
    *,
    ranks: int = len(_RANKS),
    most: int | None = None,
    with_offsets: bool = False,
) -> _Fitted:
    """The best rule of each group among all sides and ranks, by its sum over selected queries."""
    # The queries of a group follow each other, so that one pass adds up each (`_sums`).
    chosen = np.flatnonzero(selected)
    chosen = chosen[np.argsort(group[chosen], kind="stable")]
    rows = rows.take(chosen)
    groups, number = np.unique(group[chosen], return_inverse=True)
    grown = [
        (side, rank, *_grow(rows, number, side, rank, most))
        for side in range(len(SIDES))
        for rank in range(ranks)
    ]
    scores = np.stack([score for *_, score in grown])
    best = scores.argmax(0)
    offset = np.full(len(groups), -1)
    if with_offsets and len(groups):
        at_offsets = _sums(rows.offsets, number)
        offset = np.where(at_offsets.max(-1) > scores.max(0), at_offsets.argmax(-1), -1)
    return {
        "groups": groups,
        "side": np.array([side for side, *_ in grown])[best],
        "rank": np.array([rank for _, rank, *_ in grown])[best],
        "sets": np.stack([sets for *_, sets, _ in grown])[best, np.arange(len(groups))],
        "offset": offset,
    }


def _grow(
    rows: TagRows, group: Int[np.ndarray, " Q"], side: int, rank: int, most: int | None
) -> tuple[Bool[np.ndarray, "G tag"], Float[np.ndarray, " G"]]:
    """Add the best part of speech to the set of each group as long as that helps.

    Returns:
        The sets, and the sum that each scores.
    """
    # Greedy, since the sets are too many to try all: 2 ** 17 of the universal parts of speech, for
    # every group, side and rank. The words of a set are not listed either. Its two nearest words
    # and whether they are keys are all that a rule needs, and those of a larger set follow from
    # them and from the two nearest of the new part of speech. So a round tries all additions to
    # all groups at once.
    n_groups, n_tags = (group[-1] + 1 if len(group) else 0), rows.distance.shape[-1]
    sets = np.zeros((n_groups, n_tags), dtype=bool)
    best = np.full(n_groups, -np.inf)
    distance, right = rows.distance[:, side], rows.right[:, side]
    chance = rows.chance[:, None]
    near = np.full((len(group), 2, 1), FAR, dtype=np.int16)
    hit = np.zeros(near.shape, dtype=bool)
    for _ in range(n_tags if most is None else most):
        new_near, new_hit = _merged(near, hit, distance, right)
        # A query in which the rule names no word scores a random guess, so that rules for rare and
        # for frequent words are compared on the same queries.
        value = np.where(new_near[:, rank] < FAR, new_hit[:, rank], chance)
        present = np.unique(group)
        score = np.where(sets[present], -np.inf, _sums(value, group))
        tag = score.argmax(-1)
        score = score[np.arange(len(present)), tag]
        gains = score > best[present] + _LEAST_GAIN
        best[present[gains]] = score[gains]
        sets[present[gains], tag[gains]] = True
        added = np.full(n_groups, -1)
        added[present[gains]] = tag[gains]
        # The sets of the other groups are final: their rows leave, and rounds become cheaper.
        keep = np.flatnonzero(added[group] >= 0)
        if not len(keep):
            break
        column = added[group[keep]][:, None, None]
        near = np.take_along_axis(new_near[keep], column, -1)
        hit = np.take_along_axis(new_hit[keep], column, -1)
        group, distance, right, chance = group[keep], distance[keep], right[keep], chance[keep]
    return sets, best


def _merged(
    near: Int16[np.ndarray, "Q 2 1"],
    hit: Bool[np.ndarray, "Q 2 1"],
    distance: Int16[np.ndarray, "Q 2 tag"],
    right: Bool[np.ndarray, "Q 2 tag"],
) -> tuple[Int16[np.ndarray, "Q 2 tag"], Bool[np.ndarray, "Q 2 tag"]]:
    """The two nearest words of a set with each further part of speech; equal words count once."""
    (a, b), (hit_a, hit_b) = near.swapaxes(0, 1), hit.swapaxes(0, 1)
    (c, d), (hit_c, hit_d) = distance.swapaxes(0, 1), right.swapaxes(0, 1)
    # On one side, equal distances are the same word, which a set holds twice where the query's own
    # class (`with_own_class`) is among its parts of speech.
    closer, equal = c < a, c == a
    first, hit_first = np.where(closer, c, a), np.where(closer, hit_c, hit_a)
    # The second is the smaller of the two that remain.
    farther, hit_farther = np.where(closer, a, b), np.where(closer, hit_a, hit_b)
    following = np.where(closer | equal, d, c)
    hit_following = np.where(closer | equal, hit_d, hit_c)
    second = np.minimum(farther, following)
    hit_second = np.where(following < farther, hit_following, hit_farther)
    return np.stack([first, second], 1), np.stack([hit_first, hit_second], 1)


def _sums(
    values: Float[np.ndarray, "Q K"], group: Int[np.ndarray, " Q"]
) -> Float[np.ndarray, "G K"]:
    """The sum of each group, in order; the rows of a group follow each other."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(starts):
        return np.zeros((0, values.shape[1]))
    return np.add.reduceat(values.astype(np.float64), starts, axis=0)
