"""What a clip did: the heads that it scaled, and by how much."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def after(self, earlier: "ClippedHead | None") -> "ClippedHead":
        """This clip and an earlier one of the same head together."""
        if earlier is None:
            return self
        return replace(earlier, factor=earlier.factor * self.factor)


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


@dataclass(frozen=True)
class LookAhead:
    """What `QKClip.look_ahead` did.

    Attributes:
        step: The optimizer step that begins.
        passes: How many times the batch was run; 0 if no head was near the bar.
        heads: The heads that were clipped, with their largest logits when they first passed the
            bar. A head that was clipped again in a later pass has the product of its factors.
        within_bar: Whether no head passed the bar in the last pass. True if there was none.
    """

    step: int
    passes: int
    heads: tuple[ClippedHead, ...]
    within_bar: bool

    def __str__(self) -> str:
        if not self.passes:
            return f"before step {self.step}: no head near the bar"
        passes = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        left = "" if self.within_bar else "; heads are still over the bar"
        return f"before step {self.step}: {passes}, clipped {_named(self.heads)}{left}"


def _named(heads: Sequence[ClippedHead]) -> str:
    named = [f"{x.head} ({x.max_logit:.4g}, times {x.factor:.3g})" for x in heads]
    more = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return ", ".join([*named[:_NAMED], *more]) or "no head"
