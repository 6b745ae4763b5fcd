"""What is evaluated: texts and random sequences, the halves of their texts, and null models."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import nn

from headwise._display import did_you_mean
from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, UnsupportedError
from headwise.roles.evaluation import Evaluator
from headwise.roles.relations import PROBED, Item, Role, TokenText, as_item, shuffled
from headwise.roles.testing._evidence import halves

SEQUENCES = 100  # of random tokens
_DIGEST_SIZE = 16  # bytes
_SPLITS = 6  # one for the results, five for their stability
READ = ("permuted", "random", "shuffled")


@dataclass(frozen=True)
class Evidence:
    """Which nulls to evaluate besides those that cost no pass over the texts, and the seed.

    A null is a baseline without knowledge of the relation. Each null here costs a pass over the
    texts. `permuted` is the best head of the same model with the entries of every weight matrix
    shuffled, which keeps their scale only. `random` is the best head of the same model with
    freshly initialised weights. `shuffled` is the head itself on the same words in another
    order, for structural roles except translation, which does not depend on the order. In a text
    without words, tokens are shuffled.

    Attributes:
        nulls: Their names. None is every null available for the model and the texts.
        models: The number of models of each kind, each with a seed of its own; the null is the
            best head of all of them.
        splits: The number of random splits of the texts into a half to choose on and a held-out
            half. All numbers are those of the first; `stability` is how many of the others find
            the same. Splits cost no pass over the texts. None is 6; `find_heads` has a single
            split and takes no other number.
        seed: The seed of the halves, sequences, null models, orders and bootstrap draws.
    Raises:
        ArgumentError: an unknown null, fewer than one model or split, or a seed below 0.
    """

    nulls: tuple[str, ...] | None = None
    models: int = 3
    splits: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.nulls or () if name not in READ]
        if unknown:
            raise ArgumentError(
                f"Evidence: no null {unknown[0]!r}.{did_you_mean(unknown[0], READ)} "
                f"Choose from {', '.join(READ)}."
            )
        if self.models < 1:
            raise ArgumentError(f"Evidence: models={self.models}. Give 1 or more, or nulls=().")
        if self.splits is not None and self.splits < 1:
            raise ArgumentError(f"Evidence: splits={self.splits}. Give 1 or more.")
        if self.seed < 0:
            raise ArgumentError(f"Evidence: seed={self.seed}. Give 0 or more.")

    @property
    def n_splits(self) -> int:
        """The number of random splits: `splits`, or the default."""
        return _SPLITS if self.splits is None else self.splits

    def wants(self, null: str) -> bool:
        """Whether a null is among those to evaluate."""
        return self.nulls is None or null in self.nulls

    @property
    def n_models(self) -> int:
        """The number of null models, if those of each kind are available."""
        return self.models * sum(map(self.wants, _MAKERS))

    def models_like(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Build the null models one at a time, each with the name of its null.

        Raises:
            UnsupportedError: a null that was requested by name is not available.
        """
        for name, make in _MAKERS.items():
            for number in range(self.models if self.wants(name) else 0):
                null_model = make(model, self.seed + number)
                if null_model is not None:
                    yield name, null_model
                elif self.nulls is not None:
                    raise UnsupportedError(
                        f"find_roles: {type(model).__name__} {_MISSING[name]}. "
                        f"Leave {name!r} out of the nulls."
                    )


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


def permuted(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """A copy with the entries of every weight matrix shuffled; None without weight matrices.

    The copy keeps the architecture and the scale of every matrix, and nothing that was learned.
    """
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    matrices = _matrices(copied)
    with torch.no_grad():
        for matrix in matrices:
            order = torch.randperm(matrix.numel(), generator=generator).to(matrix.device)
            matrix.copy_(matrix.flatten()[order].view_as(matrix))
    return copied if matrices else None


def initialised(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """The same model with freshly initialised weights; None without a known initialisation.

    Built by its class from its `config`, as models of Hugging Face and of this library are, or
    else by the `reset_parameters` of its modules, if they cover every matrix.
    """
    weight = next(model.parameters(), torch.empty(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = _from_config(model) or _reset(model)
    return fresh if fresh is None else fresh.to(device=weight.device, dtype=weight.dtype)


def _from_config(model: nn.Module) -> nn.Module | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        fresh = type(model)(copy.deepcopy(config))
    except TypeError:  # the constructor takes more than a config
        return None
    shapes = [{n: p.shape for n, p in each.named_parameters()} for each in (model, fresh)]
    return fresh if shapes[0] == shapes[1] else None


def _reset(model: nn.Module) -> nn.Module | None:
    copied = copy.deepcopy(model)
    reached: set[nn.Parameter] = set()
    for module in copied.modules():
        for name in (
            "reset_parameters",
            "_reset_parameters",
        ):  # the latter of nn.MultiheadAttention
            if callable(reset := getattr(module, name, None)):
                reset()
                reached.update(module.parameters(recurse=False))
    matrices = _matrices(copied)
    return copied if matrices and reached.issuperset(matrices) else None


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [
        weight for weight in model.parameters() if weight.ndim > 1 and weight.is_floating_point()
    ]


_MAKERS: Mapping[str, Callable[[nn.Module, int], nn.Module | None]] = {
    "permuted": permuted,
    "random": initialised,
}
_MISSING = {
    "permuted": "has no weight matrix to permute",
    "random": "has no known initialisation (neither a config that its class is built from nor "
    "reset_parameters)",
}
