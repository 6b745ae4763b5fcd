"""A study: the results about all heads of a model, and the methods that add to them."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from headwise._display import counted, printable
from headwise.errors import ArgumentError
from headwise.files import as_path
from headwise.head_effects import HeadEffects
from headwise.report._comparison import Comparison
from headwise.report._saved import read_study, write_study
from headwise.report._study_data import StudyData
from headwise.report.page import render, write_html
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Curves, Scores, notebook_html


class Study(StudyData):
    """The results of a study of a model's heads on some texts, which can be written as a page.

    Attributes:
        title: The model's name.
        model: Facts about the model, in the order in which they are printed.
        text: Facts about the texts.
        table: The statistics of every head.
        meanings: Descriptions of the requested classes of tokens and gold relations, by name.
        samples: A few short texts with every head's attention map.
        training: Facts about the training run, for a Mini-GPT.
        roles: What each head does, with its evidence; None if the study did not look for roles.
        effects: What each head writes of a difference of logits, if it was added.
        scores: The importance of every head, if it was added.
        plan: Which heads a plan would remove, if it was added.
        curves: The loss as heads are removed, if it was added.
        comparison: How the heads differ from those of another model, if it was added.
    """

    def __repr__(self) -> str:
        """The model, the number of heads, and the findings; the page holds the rest."""
        lines = [
            f"Study of {self.title}: {counted(len(self.table.heads), 'head')}",
            *self.findings(),
        ]
        return "\n  ".join(map(printable, lines))

    def _repr_html_(self) -> str:
        """The findings, and a map of the roles, or of a statistic of all heads."""
        table = self.table
        plot = partial(table.plot, table.statistics[0]) if self.roles is None else self.roles.plot
        return notebook_html(repr(self), plot)

    def with_roles(self, roles: Roles) -> "Study":
        """The same study with the roles of its heads, as `find_roles` returns them.

        Raises:
            ArgumentError: they are roles of another model.
        """
        self._check_model("roles", roles.model)
        return replace(self, roles=roles)

    def with_effects(self, effects: HeadEffects) -> "Study":
        """The same study with the effects of its heads, as `headwise.effects` returns them.

        Raises:
            ArgumentError: they are effects of another model.
        """
        self._check_model("effects", effects.model)
        return replace(self, effects=effects)

    def with_pruning(
        self,
        *,
        scores: Scores | None = None,
        plan: Plan | None = None,
        curves: Curves | None = None,
    ) -> "Study":
        """The same study with importance scores, a plan and pruning curves of its model.

        What is None stays as it is.

        Raises:
            ArgumentError: scores or plan are of another model.
        """
        for name, result in (("scores", scores), ("plan", plan)):
            if result is not None and result.model:
                self._check_model(name, result.model)
        return replace(
            self,
            scores=scores or self.scores,
            plan=plan or self.plan,
            curves=curves or self.curves,
        )

    def with_comparison(self, comparison: Comparison) -> "Study":
        """The same study with a comparison of its model with another, as `compare` returns it.

        Raises:
            ArgumentError: neither model is the one that was studied.
        """
        if self.table.model not in comparison.models:
            raise ArgumentError(
                f"Study: the comparison is of the models {' and '.join(comparison.models)}, the "
                f"study of {self.table.model}. Give a comparison of the model that was studied."
            )
        return replace(self, comparison=comparison)

    def _check_model(self, name: str, model: str) -> None:
        if model != self.table.model:
            raise ArgumentError(
                f"Study: the {name} belong to the model {model}, the study to {self.table.model}. "
                f"Give {name} of the model that was studied."
            )

    def report(self, path: str | os.PathLike[str], *, full: bool = False) -> Path:
        """Write the page: one HTML file that needs no network. Nothing is computed again.

        Args:
            full: Whether to write all that the study holds. By default the page stays below
                5 MB and says what it leaves out.

        Raises:
            ArgumentError: the path does not end in .html.
            OutputError: the file cannot be written; no partial file is left behind.
        """
        return write_html("report", render(self, full=full), as_path("Study.report", path))

    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Save the study into a new folder, which `load_study` reads: no code is in it.

        Nothing is lost: the page of the loaded study is the same to the last byte.

        Args:
            force: Whether to replace a study that exists.
        Raises:
            OutputError: the folder exists and `force` is False, holds something other than a
                study, cannot be written, or a result holds a number that JSON cannot hold. Nothing
                is left half written.
        """
        return write_study(self, as_path("Study.save", folder), force=force)


def load_study(folder: str | os.PathLike[str]) -> Study:
    """Load a study that `Study.save` wrote.

    Raises:
        InputError: the folder is missing, or holds no complete study of this format.
    """
    return Study(**read_study(as_path("load_study", folder)))
