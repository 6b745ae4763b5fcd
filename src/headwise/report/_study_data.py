"""The fields of a study, for what writes it: the page and the folder import no `Study`."""

from collections.abc import Mapping
from dataclasses import dataclass

from headwise.report._findings import Finding, no_finding_line, significant_findings
from headwise.report._samples import Sample
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Curves, HeadTable, Scores


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

        A head stands out if its share of attention is significantly above that of uniform attention
        over the same keys. That does not show what the head is for.
        """
        lines = [finding.line(self.meanings) for finding in self.significant()]
        return lines or [no_finding_line(self.table, self.meanings, self.whole_texts)]

    def significant(self) -> list[Finding]:
        """The findings behind these lines."""
        return significant_findings(self.table, self.meanings, self.whole_texts)

    @property
    def whole_texts(self) -> int | None:
        """How many texts were studied, each long text counted once; None if that is unknown."""
        texts = self.text.get("texts")
        return texts if isinstance(texts, int) else None
