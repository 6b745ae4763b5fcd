"""What a clip did: the heads that it scaled, and by how much."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.tables import Head

_NAMED = 8  # heads named in a message; the others are counted


@dataclass(frozen=True)
class ClippedHead:
    """A head whose largest logit passed the bar.

    Attributes:
        max_logit: Its largest logit, before any softcap.
        factor: What its logits were multiplied by, 0 … 1.
    """

    head: Head
    max_logit: float
    factor: float


@dataclass(frozen=True)
class ClipReport:
    """What `QKClip.step` did.

    Attributes:
        step: The optimizer step.
        watched: Whether the monitor watched it. If not, no logit is known and nothing is scaled.
        heads: The heads that were clipped.
    """

    step: int
    watched: bool
    heads: tuple[ClippedHead, ...]

    def __str__(self) -> str:
        if not self.watched:
            return f"step {self.step}: not watched"
        return f"step {self.step}: clipped {_named(self.heads)}"


def _named(heads: Sequence[ClippedHead]) -> str:
    named = [f"{x.head} ({x.max_logit:.4g}, times {x.factor:.3g})" for x in heads]
    more = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return ", ".join([*named[:_NAMED], *more]) or "no head"
