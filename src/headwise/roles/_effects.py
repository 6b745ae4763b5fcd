"""Effects of heads: what ablating them costs behaviors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor, nn

from headwise._display import counted
from headwise._progress import Progress
from headwise.errors import ArgumentError
from headwise.files import number, typed, without_nan
from headwise.ownership import check_edits_reach, find_attentions
from headwise.roles._behaviors import Behavior, Inputs
from headwise.roles._samples import digest_of_tensor, first_of_each
from headwise.roles.evidence import FEWEST_TEXTS, step_down
from headwise.scoring import GatedModel
from headwise.tables import Head, ratio_interval

WITHOUT = "without."  # prefix of the columns with ablation effects
_MOST = 8  # heads of one role that are ablated together: the first ones
# A head is redundant if ablating it costs less than this share of ablating all of them.
_REDUNDANT = 0.25
_TIMES_ALONE = 2.0  # a group must cost at least this multiple of what its heads cost alone
_SHARE_OF_ALL = 0.1  # a group must cost at least this share of ablating every head

Losses = Float64[np.ndarray, " M"]


@dataclass(frozen=True)
class Effect:
    """How much the loss of a behavior grows when some heads are mean-ablated.

    Attributes:
        heads: The heads, by name: one, or a group.
        behavior: The name of the behavior.
        effect: The mean growth of the loss over texts, in the behavior's unit.
        low: The lower end of its interval (95 %, bootstrap over texts).
        high: The upper end.
        texts: The number of distinct texts; copies of one count once.
        p: For the null hypothesis of no growth, adjusted over all heads and behaviors tried;
            NaN below 30 texts, and for a group, because groups are selected by their effect.
        control: The mean growth of the loss on the behavior's control; NaN without one.
        excess_low: The lower end of the interval of the growth minus that on the control, text by
            text.
    """

    heads: tuple[str, ...]
    behavior: str
    effect: float
    low: float
    high: float
    texts: int
    p: float = float("nan")
    control: float = float("nan")
    excess_low: float = float("nan")


@dataclass(frozen=True)
class Group:
    """Redundant heads of one role: removing one changes little, removing all of them much.

    Attributes:
        role: The role that they share.
        together: The effect of removing all of them.
        alone: The sum of the effects of removing each alone.
    """

    role: str
    together: Effect
    alone: float


@dataclass(frozen=True)
class Effects:
    """The ablation effects of heads on behaviors; empty where nothing was tried.

    Attributes:
        alone: The effect of each head that was tried on each behavior.
        groups: Redundant heads of one role.
        says: What the loss of each behavior is, by its name.
        roles: The roles that each behavior may depend on.
        labels: For each behavior, by role, the label of a head with the role that it needs.
    """

    alone: tuple[Effect, ...] = ()
    groups: tuple[Group, ...] = ()
    says: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def frame(self) -> pd.DataFrame:
        """A row per behavior and head: the effect with its interval, texts, p, and the control."""
        rows = [asdict(effect) | {"heads": effect.heads[0]} for effect in self.alone]
        columns = ["name", "behavior", "effect", "ci_low", "ci_high", "texts", "p_adj"]
        columns += ["control", "excess_low"]
        frame = pd.DataFrame(rows, columns=list(Effect.__dataclass_fields__))
        return frame.set_axis(columns, axis=1)

    def of(self, name: str) -> list[Effect]:
        """The effects of one head, in the order of the behaviors."""
        return [effect for effect in self.alone if effect.heads == (name,)]

    def joined(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Add the effect on each behavior to the rows of the roles that it may depend on.

        NaN stands in the rows of other roles, and where the head was not tried.
        """
        rows = rows.drop(columns=[name for name in rows if str(name).startswith(WITHOUT)])
        frame = self.frame()
        for behavior, roles in self.roles.items():
            by_head = frame[frame["behavior"] == behavior].set_index("name")
            for column, end in (("effect", ""), ("ci_low", ".low"), ("ci_high", ".high")):
                values = rows["name"].map(by_head[column].astype(float).to_dict()).astype(float)
                rows[f"{WITHOUT}{behavior}{end}"] = values.where(rows["role"].isin(list(roles)))
        return rows

    def lines(self, name: str) -> Iterator[str]:
        """The effects of one head, as sentences."""
        for effect in self.of(name):
            p = "" if effect.p != effect.p else f", adjusted p {effect.p:.2g}"
            if effect.control == effect.control:
                p += f"; {effect.control:+.3f} on its control"
            behavior = effect.behavior
            yield (
                f"without it {behavior} loses {_signed(effect)} ({self.says[behavior]}; "
                f"{counted(effect.texts, 'text')}{p})"
            )
        for group in self.groups:
            if name in group.together.heads:
                yield group_line(group)

    def to_json(self) -> dict[str, Any]:
        """All effects as values that JSON can hold."""
        content: dict[str, Any] = without_nan(asdict(self))
        return content

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Effects":
        """Restore what `to_json` returned."""
        alone = tuple(map(_from_json, saved["alone"]))
        groups = tuple(
            Group(typed(group["role"], str), _from_json(group["together"]), number(group["alone"]))
            for group in saved["groups"]
        )
        says = {name: typed(text, str) for name, text in saved["says"].items()}
        if unknown := {x.behavior for x in (*alone, *(x.together for x in groups))} - says.keys():
            raise ValueError(f"the behavior {min(unknown)!r} has no description")
        return cls(
            alone=alone,
            groups=groups,
            says=says,
            roles={name: tuple(roles) for name, roles in saved["roles"].items()},
            labels={name: dict(labels) for name, labels in saved["labels"].items()},
        )


def group_line(group: Group) -> str:
    """A sentence that describes a group."""
    together = group.together
    *first, last = together.heads
    return (
        f"{', '.join(first)} and {last} back each other up: without all of them "
        f"{together.behavior} loses {_signed(together)}, without each alone "
        f"{group.alone:+.3f} in sum"
    )


def _signed(effect: Effect) -> str:
    return f"{effect.effect:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]"


def _from_json(saved: Mapping[str, Any]) -> Effect:
    numbers: dict[str, Any] = {
        name: np.nan if value is None else number(value)
        for name, value in saved.items()
        if name not in ("heads", "behavior", "texts")
    }
    heads = tuple(typed(name, str) for name in saved["heads"])
    return Effect(heads, typed(saved["behavior"], str), texts=typed(saved["texts"], int), **numbers)


def ablate_each(
    model: nn.Module,
    behaviors: Sequence[Behavior],
    heads: Sequence[Head],
    sharing: Mapping[str, Sequence[Head]],
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Effects:
    """Measure the effect of each head on each behavior, and find groups of redundant heads.

    Args:
        sharing: The heads of each role, the strongest first.
        on_progress: Called after each head with the number of heads done and of all.
    """
    names = [behavior.name for behavior in behaviors]
    if len(set(names)) < len(names) or not names:
        raise ArgumentError(
            f"effects: behaviors are named {', '.join(names) or 'nothing'}. Give at least one, "
            f"and each a name of its own."
        )
    ablations = [AblationLosses(model, behavior) for behavior in behaviors]
    alone = _each_alone(ablations, heads, seed, on_progress)
    groups = [
        group
        for ablation in ablations
        for group in find_groups(
            ablation, {role: sharing.get(role, ()) for role in ablation.behavior.roles}, seed=seed
        )
    ]
    return Effects(
        alone=tuple(alone),
        groups=tuple(groups),
        says={behavior.name: behavior.says for behavior in behaviors},
        roles={behavior.name: tuple(behavior.roles) for behavior in behaviors},
        labels={behavior.name: dict(behavior.labels) for behavior in behaviors},
    )


class AblationLosses:
    """The losses of a behavior, intact and with heads ablated, on the same texts."""

    def __init__(self, model: nn.Module, behavior: Behavior) -> None:
        self.behavior = behavior
        inputs = [batch.inputs for batch in behavior.batches]
        attentions = find_attentions(model, inputs[0], needs_projections=False)
        check_edits_reach(model, attentions, inputs[0])
        parts = [(batch.inputs, batch.loss) for batch in (*behavior.batches, *behavior.control)]
        self._gated = GatedModel.with_loss_by_batch(
            model, attentions, behavior.name, parts, reference=inputs
        )
        # The search for groups asks for the same sets again, and each costs a pass over all texts:
        # 7 passes, not 17, for a role of four heads of which two are redundant.
        self._known: dict[frozenset[Head], Losses] = {}
        self.heads = self._gated.heads
        self._distinct: list[int] | slice = slice(None)
        self.intact = self._losses(())
        self._intact_control = self._losses((), control=True)
        if len(self._intact_control) not in (0, len(self.intact)):
            raise ArgumentError(
                f"effects: {behavior.name!r} has {len(self.intact)} texts and "
                f"{len(self._intact_control)} of its control. Give as many of both."
            )
        # All that follows is of the first of each.
        self._distinct = _distinct_texts(inputs, self.intact)
        self.intact = self.intact[self._distinct]
        self._intact_control = self._intact_control[self._distinct if behavior.control else []]

    def growth(self, heads: Sequence[Head]) -> Losses:
        """By how much the loss of each text grows when these heads are ablated."""
        ablated = frozenset(heads)
        if ablated not in self._known:
            self._known[ablated] = self._losses(heads) - self.intact
        return self._known[ablated]

    def control_growth(self, heads: Sequence[Head]) -> Losses:
        """By how much the loss of each text of the control grows; empty without a control."""
        return self._losses(heads, control=True) - self._intact_control

    def _losses(self, heads: Sequence[Head], *, control: bool = False) -> Losses:
        first, end = len(self.behavior.batches), len(self._gated.batches)
        batches = range(first, end) if control else range(first)
        losses = self._gated.losses_without(heads, batches)
        bad = ~np.isfinite(losses)
        if bad.any():
            raise ArgumentError(
                f"effects: {self.behavior.name!r} is not finite on {bad.sum()} of {len(bad)} "
                f"texts. Leave them out."
            )
        return losses[self._distinct] if len(losses) else losses


def _distinct_texts(batches: Sequence[Inputs], losses: Losses) -> list[int]:
    """The numbers of texts without copies: of which all that the model reads, and the loss, agree.

    Two texts of the same tokens may be asked for different words, which their losses tell.
    """
    texts = []
    for batch in batches:
        tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.ndim]
        texts += [tuple(map(digest_of_tensor, row)) for row in zip(*tensors, strict=False)]
    if len(texts) != len(losses):  # a loss of several rows
        return [*range(len(losses))]
    # Another batch may compute the same loss with other rounding.
    return first_of_each((text, f"{loss:.5g}") for text, loss in zip(texts, losses, strict=True))


def _each_alone(
    ablations: Sequence[AblationLosses],
    heads: Sequence[Head],
    seed: int,
    on_progress: Progress | None,
) -> list[Effect]:
    """The effects of every head on one behavior after the other, tested as one family."""
    growths: list[Float64[np.ndarray, "M N"]] = []
    for ablation in ablations:
        growth = np.zeros((len(ablation.intact), len(heads)))
        for column, head in enumerate(heads):
            growth[:, column] = ablation.growth([head])
            if on_progress is not None:
                done = len(growths) * len(heads) + column + 1
                on_progress(done, len(ablations) * len(heads))
        growths.append(growth)
    tested = [growth if len(growth) >= FEWEST_TEXTS else growth[:, :0] for growth in growths]
    effects = []
    for ablation, growth, p in zip(ablations, growths, step_down(tested, seed=seed), strict=True):
        adjusted = p if p.size else np.full(len(heads), np.nan)
        effects += [
            _effect([head], ablation, growth[:, column], seed, float(adjusted[column]))
            for column, head in enumerate(heads)
        ]
    return effects


def find_groups(
    ablation: AblationLosses, sharing: Mapping[str, Sequence[Head]], *, seed: int = 0
) -> list[Group]:
    """Find the heads of each role that a behavior can lose one by one, but not all together.

    The search starts from the first eight heads at most, leaves out those that cannot be lost
    alone, and then drops, least first, each head that adds nothing to the others. The cost of
    the group that remains exceeds the sum of the costs of its heads alone, with a bootstrap
    interval over texts that excludes 0; it is at least twice that sum, and at least a tenth of
    the cost of ablating every head.

    Args:
        sharing: The heads of each role, the strongest first.
    """
    groups: dict[frozenset[Head], Group] = {}
    for role, heads in sharing.items():
        members = _members(ablation, list(heads[:_MOST]), seed)
        if len(members) < 2:
            continue
        together = ablation.growth(members)
        alone = np.sum([ablation.growth([head]) for head in members], axis=0)
        all_heads = float(ablation.growth(ablation.heads).mean())
        cost = max(_TIMES_ALONE * float(np.mean(alone)), _SHARE_OF_ALL * all_heads)
        if _interval(together - alone, seed)[0] > 0 and together.mean() >= cost:
            effect = _effect(members, ablation, together, seed)
            groups.setdefault(frozenset(members), Group(role, effect, float(np.mean(alone))))
    return list(groups.values())


def _members(ablation: AblationLosses, heads: list[Head], seed: int) -> list[Head]:
    """The heads that can be lost alone, without those that add nothing to the others."""
    if len(heads) < 2:
        return heads
    most = _REDUNDANT * ablation.growth(heads).mean()
    members = [head for head in heads if ablation.growth([head]).mean() < most]
    while len(members) > 1:
        added = [
            ablation.growth(members)
            - ablation.growth([head for head in members if head != dropped])
            for dropped in members
        ]
        least = int(np.argmin([growth.mean() for growth in added]))
        if _interval(added[least], seed)[0] > 0:
            break
        del members[least]
    return sorted(members)


def _effect(
    heads: Sequence[Head],
    ablation: AblationLosses,
    growth: Losses,
    seed: int,
    p: float = float("nan"),
) -> Effect:
    names = tuple(str(head) for head in heads)
    ends, control = _interval(growth, seed), ablation.control_growth(heads)
    effect = Effect(names, ablation.behavior.name, float(growth.mean()), *ends, len(growth), p)
    if not len(control):
        return effect
    excess = _interval(growth - control, seed)[0]
    return replace(effect, control=float(control.mean()), excess_low=excess)


def _interval(growth: Losses, seed: int) -> tuple[float, float]:
    low, high = ratio_interval(growth[:, None], np.ones((len(growth), 1)), seed=seed)
    return float(low[0]), float(high[0])
