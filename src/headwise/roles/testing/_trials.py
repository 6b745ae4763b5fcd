"""What every model is evaluated on: the texts of the corpus, and random sequences that repeat."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.corpora import AnnotatedText
from headwise.roles.evaluation import Evaluator
from headwise.roles.relations import PROBED, Item, Role, TokenText, as_item
from headwise.roles.testing._evidence import halves
from headwise.roles.testing._nulls import Evidence, shuffled

SEQUENCES = 100  # of random tokens
_DIGEST_SIZE = 16  # bytes


@dataclass(frozen=True)
class Split:
    """The text of each item, and the texts of the selection half.

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
        self, sums: Float[np.ndarray, "P R K"]
    ) -> tuple[Float[np.ndarray, "selection R K"], Float[np.ndarray, "held R K"]]:
        """Add up the items of each text: the texts of the selection half, and the held-out ones."""
        per_text = np.zeros((len(self.selection), *sums.shape[1:]), sums.dtype)
        np.add.at(per_text, self.text_of_item, sums)
        return per_text[self.selection], per_text[~self.selection]


@dataclass(frozen=True)
class Trial:
    """Items that every model is evaluated on, and a contrast for the watched model.

    Attributes:
        evaluator: The items and their roles.
        contrast_null: The name of the null that the contrast serves.
        contrast: The same items altered so that the relations of some roles mean nothing.
        sizes: The number of tokens of each item, and 1, to average them over a text.
    """

    evaluator: Evaluator
    split: Split
    contrast_null: str = ""
    contrast: Evaluator | None = None
    sizes: Float[np.ndarray, "P 1 2"] | None = None

    @property
    def lengths(self) -> Float[np.ndarray, " held"]:
        """The mean number of tokens in the items of each held-out text."""
        assert self.sizes is not None
        total, pieces = self.split.halves(self.sizes)[1][:, 0].T
        return total / pieces


def text_trial(
    pieces: Sequence[TokenText],
    texts: Sequence[AnnotatedText],
    roles: Sequence[Role],
    evidence: Evidence,
    tags: Sequence[str] | None = None,
) -> Trial:
    """The texts of the corpus, with shuffled words as the contrast of roles that depend on order.

    Args:
        tags: The parts of speech that rules may use. None is those of the texts.
    """
    seed = evidence.seed
    distinct = distinct_texts(texts)
    number = {text: index for index, text in enumerate(distinct)}
    items = [as_item(piece, roles) for piece in pieces]
    if tags is None:
        tags = sorted({tag for text in texts for tag in text.tags} - {"_"})
    text_of_item = np.array([number[piece.text.text] for piece in pieces])
    ordered = [role for role in roles if role.depends_on_order]
    contrast = None
    if ordered and evidence.wants("shuffled"):
        contrast = Evaluator(shuffled(items, ordered, seed), ordered)
    digests = [digest_of_text(text) for text in distinct]
    split = Split(text_of_item, halves_of_texts(digests, seed), digests)
    sizes = np.array([[[len(item.ids), 1.0]] for item in items])
    return Trial(Evaluator(items, roles, tags), split, "shuffled", contrast, sizes)


def probe_trial(repeated: Sequence[Item], controls: Sequence[Item], seed: int) -> Trial | None:
    """The trial of sequences that repeat, and of as many that do not; None without any."""
    if not repeated:
        return None
    split = Split(np.arange(len(repeated)), halves(len(repeated), seed))
    return Trial(Evaluator(repeated, PROBED), split, "control", Evaluator(controls, PROBED))


def distinct_texts(texts: Sequence[AnnotatedText]) -> list[str]:
    """The sampling units: distinct strings, however often one is annotated."""
    return list(dict.fromkeys(text.text for text in texts))


def digest_of_text(text: str) -> bytes:
    """A hash that identifies a text in every shard and process."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_SIZE).digest()


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
