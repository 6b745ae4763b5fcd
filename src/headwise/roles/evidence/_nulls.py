"""Nulls: what a head scores without knowledge of the relation; from scores to hypotheses.

A further null is a name in `NULLS`, the kinds of roles that it applies to in `_APPLICABLE`, and a
function that gives its `Baseline` on both halves. If it needs another model, that is a function in
`_MODELS`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import nn

from headwise._display import did_you_mean
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import copy_model
from headwise.roles._samples import RoleSample, Split
from headwise.roles.evidence._hypotheses import Hypotheses, best_of
from headwise.roles.relations import EVEN, Role
from headwise.roles.scores import OFFSETS, RULES, RoleScores, fit_tag_rules, heuristic_names
from headwise.tables import rate

# Each null with how the table names it; the names of heuristics are those of the fitted rule.
NULLS = {
    "chance": "chance",
    **dict.fromkeys(("offset", "class", "set", "by class", "candidate"), ""),
    "permuted": "a head with permuted weights",
    "random": "a head that learned nothing",
    "shuffled": "the same words in another order",
    "control": "the same positions without repetition",
}
RULE = "rule."  # prefix of the measures of single rules among candidates
_NULL_MODELS = ("permuted", "random")
_CLASSES = ("class", "set", "by class")
# Which nulls apply to each kind of role. An offset cannot be a null for an offset, nor a
# head for evenness, since small weights make attention even: its limit is used in place of chance.
_APPLICABLE = {
    "offset": ("chance", *_NULL_MODELS),
    "sink": ("chance", *_NULL_MODELS),
    "class": ("chance", "offset", *_NULL_MODELS),
    "breadth": ("chance",),
    "structure": ("chance", "offset", *_CLASSES, "candidate", "shuffled", *_NULL_MODELS),
    "probe": ("chance", "offset", "control", *_NULL_MODELS),
}
_SPLITS = 6  # one for the results, five for their stability


@dataclass(frozen=True)
class Evidence:
    """Which nulls to evaluate besides those that cost no pass over the texts, and the seed.

    A null is a baseline without knowledge of the relation. Each null here costs a pass over the
    texts. `permuted` is the best head of the same model with the entries of every weight matrix
    shuffled, which keeps their scale only. `random` is the best head of the same model with
    freshly initialized weights. `shuffled`, of `find_roles`, is the head itself on the same words
    in another order, for structural roles except translation, which does not depend on the order;
    in a text without words, tokens are shuffled. `exchanged`, of `find_heads`, is the head itself
    where the right and the wrong stretches of an example have exchanged their tokens: a head that
    goes by their surroundings is right there, too.

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
        known = (*_MODELS, "shuffled", "exchanged")
        unknown = [name for name in self.nulls or () if name not in known]
        if unknown:
            raise ArgumentError(
                f"Evidence: no null {unknown[0]!r}.{did_you_mean(unknown[0], known)} "
                f"Choose from {', '.join(known)}."
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

    def left_out(self, *nulls: str) -> list[str]:
        """A note of those of some nulls that are not evaluated, if there are any."""
        names = [null for null in nulls if not self.wants(null)]
        return [f"nulls that were left out: {', '.join(names)}"] if names else []

    @property
    def n_models(self) -> int:
        """The number of null models, if those of each kind are available."""
        return self.models * sum(map(self.wants, _MODELS))

    def models_like(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Build the null models one at a time, each with the name of its null."""
        for name, (make, missing) in _MODELS.items():
            for number in range(self.models if self.wants(name) else 0):
                null_model = make(model, self.seed + number)
                if null_model is not None:
                    yield name, null_model
                elif self.nulls is not None:
                    raise UnsupportedError(
                        f"Evidence: {type(model).__name__} {missing}. "
                        f"Leave {name!r} out of the nulls."
                    )


def permuted(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """A copy with the entries of every weight matrix shuffled; None without weight matrices.

    The copy keeps the architecture and the scale of every matrix, and nothing that was learned.
    """
    copied = copy_model("find_roles", model)
    generator = torch.Generator().manual_seed(seed)
    matrices = _matrices(copied)
    with torch.no_grad():
        for matrix in matrices:
            order = torch.randperm(matrix.numel(), generator=generator).to(matrix.device)
            matrix.copy_(matrix.flatten()[order].view_as(matrix))
    return copied if matrices else None


def initialized(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """The same model with freshly initialized weights; None without a known initialization.

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
    copied = copy_model("find_roles", model)
    reached: set[nn.Parameter] = set()
    for module in copied.modules():
        for name in ("reset_parameters", "_reset_parameters"):  # the latter: MultiheadAttention
            if callable(reset := getattr(module, name, None)):
                reset()
                reached.update(module.parameters(recurse=False))
    matrices = _matrices(copied)
    return copied if matrices and reached.issuperset(matrices) else None


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [
        weight for weight in model.parameters() if weight.ndim > 1 and weight.is_floating_point()
    ]


# What makes each null model, and why it may be missing.
_MODELS: Mapping[str, tuple[Callable[[nn.Module, int], nn.Module | None], str]] = {
    "permuted": (permuted, "has no weight matrix to permute"),
    "random": (
        initialized,
        "has no known initialization (neither a config that its class is built from nor "
        "reset_parameters)",
    ),
}


# A null on each role, for each head to be compared with it: its score per query on the selection
# half (roles, heads), and in each held-out text (texts, roles, heads).
Baseline = tuple[Float[np.ndarray, "_ _"], Float[np.ndarray, "_ _ _"]]


def strongest(baselines: Sequence[Baseline]) -> Baseline:
    """For each role and head, the baseline that scores best on the selection half."""
    selection, rates = (np.stack(part) for part in zip(*baselines, strict=True))
    best = selection.argmax(0)[None]
    held = np.take_along_axis(rates, best[:, None], 0)[0]
    return np.take_along_axis(selection, best, 0)[0], held


def best_head(
    split: Split, value: Float[np.ndarray, "P R K"], count: Float[np.ndarray, "P R 1"]
) -> tuple[Int64[np.ndarray, " R"], Baseline]:
    """Which of `K` heads is best on the selection half, and its rates on both."""
    (selection_value, held_value), (selection_count, held_count) = (
        split.halves(value),
        split.halves(count),
    )
    best = best_of(selection_value, selection_count[..., 0])
    index = best[None, :, None]
    rates = rate(np.take_along_axis(held_value, index, -1), held_count)
    selected = np.take_along_axis(selection_value, index, -1).sum(0)
    selection_rate = rate(selected, selection_count.sum(0))
    return best, (np.nan_to_num(selection_rate, nan=-1.0), np.nan_to_num(rates))


def null_head_baseline(scores: RoleScores, split: Split) -> Baseline:
    """The best heads of a null model: each head is compared with those of as many queries.

    A layer with a sliding window has fewer eligible queries, and easier ones.
    """
    group = np.unique(scores.count.sum(0), axis=1, return_inverse=True)[1].ravel()
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]
    best = [
        best_head(split, scores.value[..., heads], scores.count[..., heads[:1]])[1]
        for heads in members
    ]
    if len(best) == 1:
        return best[0]
    selection, rates = zip(*(best[number] for number in group), strict=True)
    return np.concatenate(selection, axis=-1), np.concatenate(rates, axis=-1)


def _heuristics(
    sample: RoleSample, scores: RoleScores
) -> Iterator[tuple[str, list[str], Baseline]]:
    """The heuristics that are best on the selection half, each with its name for each role."""
    roles, split, N = sample.roles, sample.split, len(scores.heads)
    count = scores.count[..., -1:]
    names = [heuristic_names(role.level) for role in roles]
    # The best offset, and the best rule among candidates.
    for null, start, end in (("offset", 0, len(OFFSETS)), ("candidate", len(OFFSETS), None)):
        value = scores.value[..., N:-1][..., start:end]
        if value.size:
            best, baseline = best_head(split, value, count)
            pairs = zip(names, best, strict=True)
            yield null, ["".join(of[start:end][n : n + 1]) for of, n in pairs], baseline
    if (rows := scores.tag_rows) is None:
        return
    selected = split.selection[split.text_of_item[rows.item]]
    rules = fit_tag_rules(rows, selected, sample.evaluator.tags, len(roles))
    for null, (rule_names, of_query) in rules.items():
        value = np.zeros(count.shape, np.float32)
        np.add.at(value[..., 0], (rows.item, rows.role), of_query)
        yield null, rule_names, best_head(split, value, count)[1]


def _contrast(sample: RoleSample, contrast: RoleScores, shape: tuple[int, ...]) -> Baseline:
    """The heads themselves on the contrast; a text without a query has the overall rate."""
    assert sample.contrast is not None
    (selection_value, value), (selection_queries, queries) = (
        sample.split.halves(sums) for sums in (contrast.value, contrast.count)
    )
    mean = rate(value.sum(0), queries.sum(0))
    columns = [sample.roles.index(role) for role in sample.contrast.roles]
    selection, rates = np.full(shape[1:], np.nan), np.full(shape, np.nan, np.float32)
    selection[columns] = rate(selection_value.sum(0), selection_queries.sum(0))
    rates[:, columns] = np.nan_to_num(np.where(queries > 0, rate(value, queries), mean))
    return selection, rates


def hypotheses_of(
    sample: RoleSample,
    scores: RoleScores,
    contrast: RoleScores | None,
    null_heads: Mapping[str, Baseline],
) -> Hypotheses:
    """Compare every head with every null, on the held-out texts.

    Args:
        contrast: The scores of the same heads on the sample's contrast.
        null_heads: The best heads of null models, by the name of the null.
    """
    roles, split, N = sample.roles, sample.split, len(scores.heads)
    possible = np.array([scores.causal or not role.ahead for role in roles], np.float32)[:, None]
    breadth = np.array([role.kind == "breadth" for role in roles])[:, None]
    # Evenness is compared with the limit above which attention is diffuse.
    chance = np.where(breadth, np.float32(EVEN) * scores.count, scores.uniform)
    (selection_value, value), (selection_count, count), (selection_chance, held_chance) = (
        split.halves(sums[..., :N] * possible) for sums in (scores.value, scores.count, chance)
    )
    names = {null: [name] * len(roles) for null, name in NULLS.items()}
    limit = f"the limit of {EVEN}"
    names["chance"] = [limit if is_breadth else "chance" for is_breadth in breadth[:, 0]]
    baselines = dict(null_heads)
    for null, of_roles, baseline in _heuristics(sample, scores):
        names[null], baselines[null] = of_roles, baseline
    if contrast is not None:
        baselines[sample.contrast_null] = _contrast(sample, contrast, count.shape)
    # Sums on the held-out half and rates on the selection half; NaN for a null that is not there.
    held = {null: np.full(value.shape, np.nan, np.float32) for null in NULLS}
    chosen = {null: np.full(value.shape[1:], np.nan) for null in NULLS}
    held["chance"] = held_chance
    chosen["chance"] = rate(selection_chance.sum(0), selection_count.sum(0))
    for null, (of_selection, rates) in baselines.items():
        held[null], chosen[null][:] = rates * count, of_selection
    for null in NULLS:
        elsewhere = [column for column, role in enumerate(roles) if not _applies(null, role)]
        held[null][:, elsewhere] = chosen[null][elsewhere] = np.nan
    largest = np.nan_to_num([*chosen.values()], nan=-np.inf).max(0)
    measures = {
        "chosen_half": rate(_total(selection_value), _total(selection_count)),
        "chosen_baseline": np.where(np.isfinite(largest), largest, np.nan),
    }
    for name, sums in scores.masses.items():
        mass = rate(_total(split.halves(sums)[1]), _total(count))
        measures[name] = np.where(breadth, np.nan, mass)
    measures |= _rule_measures(sample, scores, count)
    return Hypotheses(value, count, held, roles, names, measures)


def _applies(null: str, role: Role) -> bool:
    """Whether a null applies to a role: mentions have no class, and others no candidates."""
    elsewhere = _CLASSES if role.level == "mention" else ("candidate",)
    return null in _APPLICABLE[role.kind] and null not in elsewhere


def _rule_measures(
    sample: RoleSample, scores: RoleScores, count: Float[np.ndarray, "held R N"]
) -> dict[str, Float[np.ndarray, "R N"]]:
    """What each rule among candidates scores on the queries of each head; none without choices."""
    N = len(scores.heads)
    chooses = np.array([[role.score == "choice"] for role in sample.roles])
    if not chooses.any():
        return {}
    value, queries = (
        sample.split.halves(sums)[1] for sums in (scores.value[..., N:-1], scores.count[..., -1:])
    )
    rates = np.nan_to_num(rate(value[..., len(OFFSETS) :], queries))
    measures = {}
    for column, name in enumerate(RULES):
        of_rule = rate(_total(rates[..., [column]] * count), _total(count))
        measures[f"{RULE}{name}"] = np.where(chooses, of_rule, np.nan)
    return measures


def _total(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, "R N"]:
    return sums.sum(0, dtype=np.float64)
