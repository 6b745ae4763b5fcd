"""What heads are held against that takes a reading of its own: other models, other orders."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.roles.relations import Item, Role

READ = ("permuted", "random", "shuffled")


@dataclass(frozen=True)
class Evidence:
    """What heads are held against beside what costs nothing, and how it is drawn.

    Every null here costs a reading of the texts. `permuted` is the best head of the same model
    with the entries of every weight matrix shuffled: its scale is kept, and nothing else.
    `random` is the best head of the same model as it is initialised. `shuffled` is the head
    itself on the same words in another order, for roles that speak of structure; where no words
    are told, it is tokens that change places.

    Attributes:
        nulls: Which of them. None is all that can be had of the model and the texts.
        models: How many models of each kind, the best head of all of them being the null.
        seed: Decides the halves, the sequences, the other models and orders, and all draws.
    Raises:
        ArgumentError: an unknown null, fewer than one model, or a seed below 0.
    """

    nulls: tuple[str, ...] | None = None
    models: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.nulls or () if name not in READ]
        if unknown:
            raise ArgumentError(f"Evidence: no null {unknown[0]!r}. Choose from {', '.join(READ)}.")
        if self.models < 1:
            raise ArgumentError(f"Evidence: models={self.models}. Give 1 or more, or nulls=().")
        if self.seed < 0:
            raise ArgumentError(f"Evidence: seed={self.seed}. Give 0 or more.")

    def wants(self, null: str) -> bool:
        return self.nulls is None or null in self.nulls

    def models_like(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The models that a model is held against, one at a time.

        Raises:
            UnsupportedError: one was asked for by name that cannot be had.
        """
        for name, make in _MAKERS.items():
            for at in range(self.models if self.wants(name) else 0):
                made = make(model, self.seed + at)
                if made is not None:
                    yield name, made
                elif self.nulls is not None:
                    raise UnsupportedError(
                        f"find_roles: {type(model).__name__} {_MISSING[name]}. "
                        f"Leave {name!r} out of the nulls."
                    )


def permuted(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """A copy in which the entries of every weight matrix have been shuffled; None without any.

    It keeps the architecture and the scale of every matrix, and forgets what was learned.
    """
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    matrices = _matrices(copied)
    with torch.no_grad():
        for one in matrices:
            order = torch.randperm(one.numel(), generator=generator).to(one.device)
            one.copy_(one.flatten()[order].view_as(one))
    return copied if matrices else None


def initialised(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """The same model before it learned anything; None where it is not known how that was.

    Made by its class from its `config`, as models of Hugging Face and of this library are; or
    else by `reset_parameters` of its modules, if that reaches every matrix.
    """
    like = next(model.parameters(), torch.empty(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _made_anew(model) or _reset(model)
    return made if made is None else made.to(device=like.device, dtype=like.dtype)


def _made_anew(model: nn.Module) -> nn.Module | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        made = type(model)(copy.deepcopy(config))
    except TypeError:  # its class is not made from a config alone
        return None
    shapes = [{n: p.shape for n, p in one.named_parameters()} for one in (model, made)]
    return made if shapes[0] == shapes[1] else None


def _reset(model: nn.Module) -> nn.Module | None:
    copied = copy.deepcopy(model)
    reached: set[nn.Parameter] = set()
    for module in copied.modules():
        for name in ("reset_parameters", "_reset_parameters"):  # as nn.MultiheadAttention has it
            if callable(reset := getattr(module, name, None)):
                reset()
                reached.update(module.parameters(recurse=False))
    matrices = _matrices(copied)
    return copied if matrices and reached.issuperset(matrices) else None


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.ndim > 1 and one.is_floating_point()]


_MAKERS: Mapping[str, Callable[[nn.Module, int], nn.Module | None]] = {
    "permuted": permuted,
    "random": initialised,
}
_MISSING = {
    "permuted": "has no weight matrix to permute",
    "random": "does not tell how it was initialised (no config that its class is made from, "
    "no reset_parameters)",
}


def shuffled(items: Sequence[Item], roles: Sequence[Role], seed: int = 0) -> list[Item]:
    """The same texts with their words in another order; pairs and units go where their words go.

    The pieces of a word stay together, as do those of a mention; what is no text stays.
    """
    rng = np.random.default_rng(seed)
    of_tokens = {role.name for role in roles if role.grid == "token"}
    return [_shuffled(item, of_tokens, rng) for item in items]


def _shuffled(item: Item, of_tokens: Collection[str], rng: np.random.Generator) -> Item:
    places = [tokens[0] for tokens in item.units["token"]]
    groups = _groups(item, places)
    order = [at for group in rng.permutation(len(groups)) for at in groups[group]]
    to = dict(zip(order, places, strict=True))
    ids = list(item.ids)
    for old, new in to.items():
        ids[new] = item.ids[old]
    return replace(
        item,
        ids=tuple(ids),
        units={
            grid: units
            if grid == "token"
            else [sorted(to[at] for at in tokens) for tokens in units]
            for grid, units in item.units.items()
        },
        pairs={
            name: [(to.get(q, q), to.get(k, k)) for q, k in pairs] if name in of_tokens else pairs
            for name, pairs in item.pairs.items()
        },
    )


def _groups(item: Item, places: Sequence[int]) -> list[list[int]]:
    """Tokens that change places together: those between the ends of a word or a mention."""
    spans = [one for grid in ("word", "mention") for one in item.units.get(grid, ()) if one]
    reach = {at: at for at in places}  # how far the group of a token goes on
    for tokens in spans:
        reach[tokens[0]] = max(reach[tokens[0]], tokens[-1])
    groups: list[list[int]] = []
    end = -1
    for at in places:
        if at > end:
            groups.append([])
        groups[-1].append(at)
        end = max(end, reach[at])
    return groups
