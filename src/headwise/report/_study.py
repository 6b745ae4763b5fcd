"""What a study holds: facts, a table, and a few short texts with every head's map."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32

from headwise._display import counted, printable
from headwise.errors import ArgumentError
from headwise.report._findings import nothing_found, telling
from headwise.roles import Roles
from headwise.tables import Head, HeadTable

Side = Literal["source", "target"]


@dataclass(frozen=True)
class Sample:
    """A short text and how every head attends on it.

    In an encoder-decoder the encoder's heads attend within the text, the decoder's within the
    target, and those across from the target to the text.

    Attributes:
        tokens: The text, as the model reads it.
        weights: The exact weights of each head: a row for each query, which sums to 1;
            0 for a key that the query may not see.
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
class Study:
    """All that is known of a model's heads on some texts: enough to draw its page.

    Attributes:
        title: The model's name.
        model: Facts about the model, in the order in which they are printed.
        text: Facts about the texts.
        table: What was seen of every head.
        meanings: What the statistics say that were asked for beside the built-in ones:
            classes of tokens and gold relations, by name.
        samples: A few short texts with every head's map.
        training: Facts about the training run, for a model that we trained.
        roles: What each head does, with its evidence; None where it was not looked for.
    """

    title: str
    model: Mapping[str, str | int]
    text: Mapping[str, str | int]
    table: HeadTable
    meanings: Mapping[str, str]
    samples: tuple[Sample, ...]
    training: Mapping[str, str | int | float] | None
    roles: Roles | None = None

    def __repr__(self) -> str:
        """What was studied, and what came out; the page holds the rest."""
        told = [
            f"Study of {self.title}: {counted(len(self.table.heads), 'head')}",
            *self.findings(),
        ]
        return "\n  ".join(map(printable, told))

    def with_roles(self, roles: Roles) -> "Study":
        """The same study with what each head does, as `find_roles` found it.

        Raises:
            ArgumentError: they are roles of another model.
        """
        if roles.model != self.table.model:
            raise ArgumentError(
                f"Study: the roles are of the model {roles.model}, the study of "
                f"{self.table.model}. Find the roles of the model that was studied."
            )
        return replace(self, roles=roles)

    def findings(self) -> list[str]:
        """Up to three lines about heads that stand out, or one that none does or was tested.

        A head stands out where its share of attention lies surely above what attention spread
        evenly over the same keys would give. What the head is for does not follow from that.
        """
        about = (self.table, self.meanings, self.whole_texts)
        found = [finding.line(self.meanings) for finding in telling(*about)]
        return found or [nothing_found(*about)]

    @property
    def whole_texts(self) -> int | None:
        """How many texts were studied, long ones counted once; None where that is not known."""
        texts = self.text.get("texts")
        return texts if isinstance(texts, int) else None

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one HTML file that needs no network. Nothing is computed anew.

        Raises:
            ArgumentError: the path does not end in .html.
            OutputError: the file cannot be written; nothing is left half-written.
        """
        # Not at the top: the page is drawn from a Study, so it imports this file.
        from headwise.report._page import write_page

        return write_page(self, Path(path))
