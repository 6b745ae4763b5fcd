"""Every step tried on models, as tables of the docs: a tick, or the number of the reason."""

import sys
from collections.abc import Collection, Iterable

from architectures.cases import ArchitectureCase
from architectures.trial import Trial, try_out

from benchmarks._report import table

# A part of the message of a refusal, and the reason as the table gives it.
REASONS = {
    "no attention call was captured": "no softmax attention that can be followed",
    "no attention was captured": "no softmax attention that can be followed",
    "are mixed or moved on their way into": "heads are mixed before their output projection",
    "no output projection of its own": "heads are not mixed by a plain linear layer",
    "attends several times in one pass": "a layer attends several times in one pass",
    "depend on one another": "a norm over all heads, or values that heads share",
    "is shared by several layers": "layers share weights, and would keep different heads",
    "does not run": "its code outside the attention assumes the number of heads",
    "Something else depends on which heads": "biases outside the attention belong to heads",
    "runs without gradients": "it switches gradients off inside",
    "does not open right in a fresh process": "the loaded model answers differently",
    "leaves no place for further keys": "queries, keys and values are interleaved",
    "does not compute attention from": "heads are mixed before or after the softmax",
}  # fmt: skip


class Trials:
    """Tables that share one list of numbered reasons, and the errors that are no refusals.

    Args:
        steps: The steps to try, a column each.
        anchor: The heading of the page under which the reasons stand.
    """

    def __init__(self, steps: tuple[str, ...], anchor: str) -> None:
        self.steps, self.anchor = steps, anchor
        self.reasons: dict[str, int] = {}
        self.broken: list[str] = []

    def table(
        self,
        kind: str,
        cases: Iterable[tuple[str, ArchitectureCase]],
        only: Collection[str] | None = None,
    ) -> str:
        """Try the steps on each case: a line per case, printed as soon as it is known."""
        rows = []
        for name, case in cases:
            if only and name not in only:
                continue
            trial = try_out(case, self.steps)
            self.broken += [f"{name}, {step}: {error}" for step, error in trial.broken.items()]
            rows.append([name, *(self._cell(trial, step) for step in self.steps)])
            print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
        return table([kind, *self.steps], rows)

    def notes(self) -> str:
        """The numbered reasons of all tables so far."""
        return "\n".join(f"{number}. {reason}" for reason, number in self.reasons.items())

    def _cell(self, trial: Trial, step: str) -> str:
        """A tick, the number of the reason, or nothing if the step was not reached."""
        if step in trial.broken:
            return "error"
        if step not in trial.results:
            return ""
        message = trial.results[step]
        if not message:
            return "✓"
        known = (reason for part, reason in REASONS.items() if part in message)
        reason = next(known, message.partition(": ")[2].partition(". ")[0])
        return f"[{self.reasons.setdefault(reason, len(self.reasons) + 1)}](#{self.anchor})"
