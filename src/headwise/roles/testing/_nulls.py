"""Nulls that cost a pass over the texts: models without knowledge, texts in another order."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from torch import nn

from headwise._display import did_you_mean
from headwise.errors import ArgumentError, UnsupportedError
from headwise.roles.relations import Item, Role

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


def shuffled(items: Sequence[Item], roles: Sequence[Role], seed: int = 0) -> list[Item]:
    """The same texts with their words in another order; pairs and units move with their words.

    The tokens of a word stay together, as do those of a mention; special tokens keep their places.
    The order of a text depends on its tokens and the seed, not on the other texts.
    """
    token_roles = {role.name for role in roles if role.grid == "token"}
    return [_shuffled(item, token_roles, _generator_of(item, seed)) for item in items]


def _generator_of(item: Item, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(np.array(item.ids, dtype="<i8").tobytes())])


def _shuffled(item: Item, token_roles: Collection[str], rng: np.random.Generator) -> Item:
    positions = [tokens[0] for tokens in item.units["token"]]
    groups = _groups(item, positions)
    order = [position for group in rng.permutation(len(groups)) for position in groups[group]]
    moved = dict(zip(order, positions, strict=True))
    ids = list(item.ids)
    for old, new in moved.items():
        ids[new] = item.ids[old]
    return replace(
        item,
        ids=tuple(ids),
        units={
            grid: units
            if grid == "token"
            else [sorted(moved.get(token, token) for token in tokens) for tokens in units]
            for grid, units in item.units.items()
        },
        pairs={
            name: [(moved.get(q, q), moved.get(k, k)) for q, k in pairs]
            if name in token_roles
            else pairs
            for name, pairs in item.pairs.items()
        },
    )


def _groups(item: Item, positions: Sequence[int]) -> list[list[int]]:
    """Tokens that move together: those between the ends of a word or a mention."""
    reach = {position: position for position in positions}  # where the group of a token ends
    for unit in (unit for grid in ("word", "mention") for unit in item.units.get(grid, ())):
        if tokens := [token for token in unit if token in reach]:  # special ones keep their places
            reach[tokens[0]] = max(reach[tokens[0]], tokens[-1])
    groups: list[list[int]] = []
    end = -1
    for position in positions:
        if position > end:
            groups.append([])
        groups[-1].append(position)
        end = max(end, reach[position])
    return groups
