"""The data of a study: facts, a table, and the attention maps of a few short texts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from headwise._display import counted
from headwise.report._findings import no_finding_line, significant_findings
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Curves, Head, HeadTable, Scores

Side = Literal["source", "target"]


@dataclass(frozen=True)
class TopPairs:
    """The keys that each query of a head attends to most, from the largest weight down.

    Attributes:
        keys: Positions of keys; −1 if no further key has any weight.
        weights: Their weights, 0 … 1.
    """

    keys: Int32[np.ndarray, "T k"]
    weights: Float32[np.ndarray, "T k"]


@dataclass(frozen=True)
class Sample:
    """A text and the attention of the heads on it: exact maps, or the strongest pairs.

    In an encoder-decoder the encoder's heads attend within the text, the decoder's heads within
    the target, and cross-attention heads from the target to the text.

    Attributes:
        tokens: The text, as the model reads it.
        weights: The exact weights of each head: a row for each query, which sums to 1;
        targets: What the decoder of an encoder-decoder reads.
    """

    tokens: tuple[str, ...]
    weights: Mapping[Head, Float32[np.ndarray, "T S"]]
    targets: tuple[str, ...] = ()
    pairs: Mapping[Head, TopPairs] = field(default_factory=dict)
    received: Mapping[tuple[str, int], Float32[np.ndarray, " S"]] = field(default_factory=dict)

    def sides(self, head: Head) -> tuple[Side, Side]:
        """Which text the queries of a head belong to, and which its keys."""
        if not self.targets or head.stack == "encoder":
            return "source", "source"
        return "target", "source" if head.stack.endswith("cross") else "target"

    def side(self, side: Side) -> tuple[str, ...]:
        """The tokens of the text, or of its target."""
        return self.tokens if side == "source" else self.targets


@dataclass(frozen=True)
class LookData:
    """The attention of every head on one text. `Look` describes the fields."""

    title: str
    model: str
    sample: Sample
    versions: Mapping[str, str]

    def summary(self) -> str:
        """The heads, the model and the tokens, in a line."""
        heads = list(self.sample.weights or self.sample.pairs)
        layers = len({(head.stack, head.layer) for head in heads})
        tokens = counted(len(self.sample.tokens), "token")
        if self.sample.targets:
            tokens += f" and {counted(len(self.sample.targets), 'target token')}"
        where = f"{counted(len(heads), 'head')} in {counted(layers, 'layer')} of {self.model}"
        return f"{where}, on {tokens}."


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
    scores: Scores | None = None
    plan: Plan | None = None
    curves: Curves | None = None

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
