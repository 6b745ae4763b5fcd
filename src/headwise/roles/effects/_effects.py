"""What behaviours lose without heads, beside the roles that the heads have."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from headwise._display import counted

WITHOUT = "without."  # how the columns beside a role begin


@dataclass(frozen=True)
class Effect:
    """What a behaviour loses when some heads give only what they give in the mean.

    Attributes:
        heads: The heads, by name: one, or a group.
        behaviour: Its name.
        effect: The mean over texts of what the loss grows by, in the behaviour's own unit.
        low: Where its interval begins (95 %, texts drawn with replacement).
        high: Where it ends.
        texts: How many texts.
        p: That it grows by nothing, adjusted over all heads and behaviours tried; NaN below 30
            texts, and for a group, which was chosen.
    """

    heads: tuple[str, ...]
    behaviour: str
    effect: float
    low: float
    high: float
    texts: int
    p: float = float("nan")


@dataclass(frozen=True)
class Group:
    """Heads of one role that back each other up: each alone removable, together not.

    Attributes:
        role: The role that they share.
        together: What the behaviour loses without all of them.
        alone: The sum of what it loses without each.
    """

    role: str
    together: Effect
    alone: float


@dataclass(frozen=True)
class Effects:
    """What behaviours lose without heads; empty where nothing was tried.

    Attributes:
        alone: What each behaviour loses without each head that was tried.
        groups: Heads of one role that back each other up.
        says: What the number of each behaviour is, by its name.
        roles: The roles that each behaviour may depend on.
    """

    alone: tuple[Effect, ...] = ()
    groups: tuple[Group, ...] = ()
    says: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def frame(self) -> pd.DataFrame:
        """A row per behaviour and head: effect, the ends of its interval, texts and adjusted p."""
        rows = [asdict(one) | {"heads": one.heads[0]} for one in self.alone]
        columns = ["name", "behaviour", "effect", "ci_low", "ci_high", "texts", "p_adj"]
        frame = pd.DataFrame(rows, columns=list(Effect.__dataclass_fields__))
        return frame.set_axis(columns, axis=1)

    def of(self, name: str) -> list[Effect]:
        """The effects of one head, in the order of the behaviours."""
        return [one for one in self.alone if one.heads == (name,)]

    def beside(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of heads and roles with what each behaviour loses, where the role is one of its.

        NaN stands where it is not, and where the head was not tried.
        """
        rows = rows.drop(columns=[name for name in rows if str(name).startswith(WITHOUT)])
        for behaviour, roles in self.roles.items():
            known = {one.heads[0]: one for one in self.alone if one.behaviour == behaviour}
            theirs = [
                known.get(name) if role in roles else None
                for name, role in zip(rows["name"], rows["role"], strict=True)
            ]
            for part, ending in (("effect", ""), ("low", ".low"), ("high", ".high")):
                rows[f"{WITHOUT}{behaviour}{ending}"] = [
                    np.nan if one is None else getattr(one, part) for one in theirs
                ]
        return rows

    def lines(self, name: str) -> Iterator[str]:
        """The case of one head, in words and numbers."""
        for one in self.of(name):
            p = "" if one.p != one.p else f", adjusted p {one.p:.2g}"
            yield (
                f"without it {one.behaviour} loses {_signed(one)} ({self.says[one.behaviour]}; "
                f"{counted(one.texts, 'text')}{p})"
            )
        for group in self.groups:
            if name in group.together.heads:
                yield group_line(group)

    def about(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "alone": [_plain(one) for one in self.alone],
            "groups": [
                {"role": one.role, "alone": one.alone, "together": _plain(one.together)}
                for one in self.groups
            ],
            "says": dict(self.says),
            "roles": {name: list(roles) for name, roles in self.roles.items()},
        }

    @classmethod
    def of_about(cls, about: Mapping[str, Any]) -> "Effects":
        """Read back what `about` gave."""
        return cls(
            alone=tuple(_effect(one) for one in about["alone"]),
            groups=tuple(
                Group(one["role"], _effect(one["together"]), one["alone"])
                for one in about["groups"]
            ),
            says=dict(about["says"]),
            roles={name: tuple(roles) for name, roles in about["roles"].items()},
        )


def group_line(group: Group) -> str:
    """A group in a sentence."""
    one = group.together
    *some, last = one.heads
    return (
        f"{', '.join(some)} and {last} ({group.role}) back each other up: without all of them "
        f"{one.behaviour} loses {_signed(one)}, without each alone {group.alone:+.3f} in sum"
    )


def _signed(one: Effect) -> str:
    return f"{one.effect:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def _plain(one: Effect) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in asdict(one).items()}


def _effect(plain: Mapping[str, Any]) -> Effect:
    p = np.nan if plain["p"] is None else plain["p"]
    return Effect(**{**plain, "heads": tuple(plain["heads"]), "p": p})
