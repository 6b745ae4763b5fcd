"""Ablation effects: by how much the loss of a behaviour grows without some heads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from headwise._display import counted

WITHOUT = "without."  # prefix of the columns with ablation effects


@dataclass(frozen=True)
class Effect:
    """How much the loss of a behaviour grows when some heads are mean-ablated.

    Attributes:
        heads: The heads, by name: one, or a group.
        behaviour: The name of the behaviour.
        effect: The mean growth of the loss over texts, in the behaviour's unit.
        low: The lower end of its interval (95 %, bootstrap over texts).
        high: The upper end.
        texts: The number of texts.
        p: For the null hypothesis of no growth, adjusted over all heads and behaviours tried;
            NaN below 30 texts, and for a group, because groups are selected by their effect.
        control: The mean growth of the loss on the behaviour's control; NaN without one.
        excess_low: The lower end of the interval of the growth minus that on the control, text by
            text.
    """

    heads: tuple[str, ...]
    behaviour: str
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
    """The ablation effects of heads on behaviours; empty where nothing was tried.

    Attributes:
        alone: The effect of each head that was tried on each behaviour.
        groups: Redundant heads of one role.
        says: What the loss of each behaviour is, by its name.
        roles: The roles that each behaviour may depend on.
        labels: For each behaviour, by role, the label of a head with the role that it needs.
    """

    alone: tuple[Effect, ...] = ()
    groups: tuple[Group, ...] = ()
    says: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def frame(self) -> pd.DataFrame:
        """A row per behaviour and head: the effect with its interval, texts, p, and the control."""
        rows = [asdict(effect) | {"heads": effect.heads[0]} for effect in self.alone]
        columns = ["name", "behaviour", "effect", "ci_low", "ci_high", "texts", "p_adj"]
        columns += ["control", "excess_low"]
        frame = pd.DataFrame(rows, columns=list(Effect.__dataclass_fields__))
        return frame.set_axis(columns, axis=1)

    def of(self, name: str) -> list[Effect]:
        """The effects of one head, in the order of the behaviours."""
        return [effect for effect in self.alone if effect.heads == (name,)]

    def joined(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Add the effect on each behaviour to the rows of the roles that it may depend on.

        NaN stands in the rows of other roles, and where the head was not tried.
        """
        rows = rows.drop(columns=[name for name in rows if str(name).startswith(WITHOUT)])
        for behaviour, roles in self.roles.items():
            by_head = {
                effect.heads[0]: effect for effect in self.alone if effect.behaviour == behaviour
            }
            effects = [
                by_head.get(name) if role in roles else None
                for name, role in zip(rows["name"], rows["role"], strict=True)
            ]
            for attribute, suffix in (("effect", ""), ("low", ".low"), ("high", ".high")):
                rows[f"{WITHOUT}{behaviour}{suffix}"] = [
                    np.nan if effect is None else getattr(effect, attribute) for effect in effects
                ]
        return rows

    def lines(self, name: str) -> Iterator[str]:
        """The effects of one head, as sentences."""
        for effect in self.of(name):
            p = "" if effect.p != effect.p else f", adjusted p {effect.p:.2g}"
            if effect.control == effect.control:
                p += f"; {effect.control:+.3f} on its control"
            behaviour = effect.behaviour
            yield (
                f"without it {behaviour} loses {_signed(effect)} ({self.says[behaviour]}; "
                f"{counted(effect.texts, 'text')}{p})"
            )
        for group in self.groups:
            if name in group.together.heads:
                yield group_line(group)

    def to_json(self) -> dict[str, Any]:
        """All effects as values that JSON can hold."""
        return {
            "alone": [_effect_json(effect) for effect in self.alone],
            "groups": [
                {
                    "role": group.role,
                    "alone": group.alone,
                    "together": _effect_json(group.together),
                }
                for group in self.groups
            ],
            "says": dict(self.says),
            "roles": {name: list(roles) for name, roles in self.roles.items()},
            "labels": {name: dict(labels) for name, labels in self.labels.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Effects":
        """Restore what `to_json` returned."""
        return cls(
            alone=tuple(_effect(effect) for effect in saved["alone"]),
            groups=tuple(
                Group(group["role"], _effect(group["together"]), group["alone"])
                for group in saved["groups"]
            ),
            says=dict(saved["says"]),
            roles={name: tuple(roles) for name, roles in saved["roles"].items()},
            labels={name: dict(labels) for name, labels in saved.get("labels", {}).items()},
        )


def group_line(group: Group) -> str:
    """A sentence that describes a group."""
    together = group.together
    *first, last = together.heads
    return (
        f"{', '.join(first)} and {last} ({group.role}) back each other up: without all of them "
        f"{together.behaviour} loses {_signed(together)}, without each alone "
        f"{group.alone:+.3f} in sum"
    )


def _signed(effect: Effect) -> str:
    return f"{effect.effect:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]"


def _effect_json(effect: Effect) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in asdict(effect).items()}


def _effect(saved: Mapping[str, Any]) -> Effect:
    numbers: dict[str, Any] = {
        name: np.nan if value is None else value for name, value in saved.items()
    }
    return Effect(**(numbers | {"heads": tuple(saved["heads"])}))
