"""Samples: the texts and the random sequences that every model is scored on, split into halves."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError
from headwise.roles.relations import (
    PROBED,
    Item,
    Role,
    TokenText,
    as_item,
    shuffled,
    with_usual_keys,
)
from headwise.roles.scores import Evaluator
from headwise.tables import halves

SEQUENCES = 100  # of random tokens
_DIGEST_SIZE = 16  # bytes


@dataclass(frozen=True)
class Split:
    """The text of each item, and the texts of the selection half.

    A text is what counts as independent of others: the texts of one group are one text here.

    Attributes:
        text_of_item: The text that each item is a piece of.
        selection: The texts on which heuristics and null heads are selected; the others are
            held out.
        digests: The digest of each text, from which other splits are drawn; none for items that
            are no texts.
    """

    text_of_item: Int64[np.ndarray, " P"]
    selection: Bool[np.ndarray, " M"]
    digests: Sequence[bytes] = ()

    def halves(
        self, sums: Float[np.ndarray, " P *axes"]
    ) -> tuple[Float[np.ndarray, " selection *axes"], Float[np.ndarray, " held *axes"]]:
        """Add up the items of each text: the texts of the selection half, and the held-out ones."""
        per_text = sums_by_text(sums, self.text_of_item, len(self.selection))
        return per_text[self.selection], per_text[~self.selection]

    def another(self, seed: int, number: int) -> "Split":
        """A further split of the same texts; number 0 is this one."""
        if number == 0:
            return self
        if self.digests:
            return replace(self, selection=halves_of_texts(self.digests, seed, number))
        return replace(self, selection=halves(len(self.selection), [seed, number]))


@dataclass(frozen=True)
class RoleSample:
    """Items that every model is scored on, and a contrast for the watched model.

    Attributes:
        evaluator: The items and their roles.
        contrast_null: The name of the null that the contrast serves.
        contrast: The same items altered so that the relations of some roles mean nothing.
    """

    evaluator: Evaluator
    split: Split
    contrast_null: str = ""
    contrast: Evaluator | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.evaluator.roles

    @property
    def lengths(self) -> Float[np.ndarray, " held"]:
        """The mean number of tokens in the items of each held-out text."""
        sizes = np.array([[[len(item.ids), 1.0]] for item in self.evaluator.items])
        total, pieces = self.split.halves(sizes)[1][:, 0].T
        return total / pieces


def text_sample(
    pieces: Sequence[TokenText], texts: Sequence[AnnotatedText], groups: Mapping[str, str],
    roles: Sequence[Role], seed: int, *, shuffles: bool,
) -> RoleSample:  # fmt: skip
    """The texts of the corpus, with shuffled words as the contrast of roles that depend on order.

    Args:
        groups: The name of what each text counts as: see `groups_of`.
        shuffles: Whether the contrast is asked for.
    """
    number = {group: index for index, group in enumerate(dict.fromkeys(groups.values()))}
    items = [as_item(piece, roles) for piece in pieces]
    ordered = [role for role in roles if role.depends_on_order]
    contrast = None
    if ordered and shuffles:
        contrast = Evaluator(shuffled(items, ordered, seed), ordered)
    members: dict[str, list[str]] = {group: [] for group in number}
    for text, group in sorted(groups.items()):
        members[group].append(text)
    digests = [digest_of_text("\0".join(of_group)) for of_group in members.values()]
    text_of_item = np.array([number[groups[piece.text.text]] for piece in pieces])
    split = Split(text_of_item, halves_of_texts(digests, seed), digests)
    tags = sorted({tag for text in texts for tag in text.tags} - {"_"})
    if not tags:  # further splits have the classes of this one, whose items are indexed once
        items, tags = with_usual_keys(items, roles, split.selection[text_of_item])
    return RoleSample(Evaluator(items, roles, tags), split, "shuffled", contrast)


def probe_sample(
    repeated: Sequence[Item], controls: Sequence[Item], seed: int
) -> RoleSample | None:
    """The sequences that repeat, and as many that do not; None without any."""
    if not repeated:
        return None
    split = Split(np.arange(len(repeated)), halves(len(repeated), seed))
    return RoleSample(Evaluator(repeated, PROBED), split, "control", Evaluator(controls, PROBED))


def sums_by_text(
    values: Float[np.ndarray, " P *axes"], text: Int64[np.ndarray, " P"], n: int
) -> Float[np.ndarray, " n *axes"]:
    """The sums over what belongs to each of `n` texts, from the text of each row."""
    sums = np.zeros((n, *values.shape[1:]), values.dtype)
    np.add.at(sums, text, values)
    return sums


def first_of_each(keys: Iterable[Hashable]) -> list[int]:
    """The number of the first of each distinct key, in order: copies are no further evidence."""
    first: dict[Hashable, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    return [*first.values()]


def groups_of(texts: Any, groups: Sequence[Hashable] | None) -> dict[str, str]:
    """The name of what each distinct text counts as: itself, or its group."""
    strings = [text if isinstance(text, str) else text.text for text in texts]
    names = strings if groups is None else [*map(str, groups)]
    if len(names) != len(strings):
        raise ArgumentError(
            f"find_roles: {len(names)} groups for {len(strings)} texts. Give a group for each."
        )
    known: dict[str, str] = {}
    for text, name in zip(strings, names, strict=True):
        if known.setdefault(text, name) != name:
            raise ArgumentError(
                f"find_roles: the groups {known[text]!r} and {name!r} have the same text "
                f"{shortened(text)}. Give copies of a text one group."
            )
    return known


def digest_of_text(text: str) -> bytes:
    """A hash that identifies a text in every shard and process."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_SIZE).digest()


def digest_of_tensor(tensor: Tensor) -> bytes:
    """A hash of the values of a tensor, by which copies of an input are known."""
    values = tensor.detach().to("cpu", torch.float64).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=_DIGEST_SIZE).digest()


def halves_of_texts(
    digests: Sequence[bytes], seed: int = 0, number: int = 0
) -> Bool[np.ndarray, " M"]:
    """The texts of the selection half; the others are held out for reporting.

    Texts are ranked by a hash of their digest, the seed and the number of the split, and the
    first half of that order is the selection half. The same texts in another order, or from
    several shards, have the same halves.
    """
    key = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=_DIGEST_SIZE).digest()
    ranks = [hashlib.blake2b(text, digest_size=_DIGEST_SIZE, key=key).digest() for text in digests]
    selection = np.zeros(len(ranks), dtype=bool)
    selection[sorted(range(len(ranks)), key=ranks.__getitem__)[: len(ranks) // 2]] = True
    return selection


def grown_set(
    errors_with: Callable[[list[int]], Float[np.ndarray, "n K"]], most: int, n_falling: int
) -> list[int]:
    """The numbers of some candidates, chosen one by one for the least error of the set.

    Args:
        errors_with: For a set, the errors that it has with each candidate added. The first decides,
            the next where candidates are equal.
        most: The most candidates in the set.
        n_falling: How many of the errors must fall for a candidate to join.
    """
    chosen: list[int] = []
    least: Float[np.ndarray, " K"] = np.full(n_falling, np.inf)
    while len(chosen) < most:
        errors = errors_with(chosen)
        errors[chosen] = np.inf
        best = int(np.lexsort(errors.T[::-1])[0])
        if not (errors[best, :n_falling] < least).all():
            break
        least = errors[best, :n_falling]
        chosen.append(best)
    return chosen
