"""The data of a study: facts, a table, and the attention maps of a few short texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32

from headwise.report._findings import no_finding_line, significant_findings
from headwise.roles import Roles
from headwise.tables import Head, HeadTable

Side = Literal["source", "target"]


@dataclass(frozen=True)
class Sample:
    """A short text and the attention map of every head on it.

    In an encoder-decoder the encoder's heads attend within the text, the decoder's heads within
    the target, and cross-attention heads from the target to the text.

    Attributes:
        tokens: The text, as the model reads it.
        weights: The exact weights of each head: a row for each query, which sums to 1;
            0 for a key that the query cannot see.
        targets: What the decoder of an encoder-decoder reads.
    """

    tokens: tuple[str, ...]
    weights: Mapping[Head, Float32[np.ndarray, "T S"]]
    targets: tuple[str, ...] = ()

    def sides(self, head: Head) -> tuple[Side, Side]:
        """Which text the queries of a head belong to, and which its keys."""
        if not self.targets or head.stack == "encoder":
            return "source", "source"
        return "target", "source" if head.stack.endswith("cross") else "target"

    def side(self, side: Side) -> tuple[str, ...]:
        """The tokens of the text, or of its target."""
        return self.tokens if side == "source" else self.targets


@dataclass(frozen=True)
class StudyData:
    """The results of a study: all that the page shows. `Study` describes the fields."""

    title: str
    model: Mapping[str, str | int]
    text: Mapping[str, str | int]
    table: HeadTable
    meanings: Mapping[str, str]
    samples: tuple[Sample, ...]
    training: Mapping[str, str | int | float] | None
    roles: Roles | None = None

    def findings(self) -> list[str]:
        """Up to three lines about heads that stand out, or one line if none does.

        A head stands out if its share of attention is significantly above that of even attention
        over the same keys. That does not show what the head is for.
        """
        tested = (self.table, self.meanings, self.whole_texts)
        findings = significant_findings(*tested)
        return [finding.line(self.meanings) for finding in findings] or [no_finding_line(*tested)]

    @property
    def whole_texts(self) -> int | None:
        """How many texts were studied, each long text counted once; None if that is unknown."""
        texts = self.text.get("texts")
        return texts if isinstance(texts, int) else None
