"""What can be done with an architecture: each step, or why it is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import headwise as hw
from architectures.cases import ArchitectureCase, Inputs
from headwise.checkpoints import _save
from headwise.errors import HeadwiseError

STEPS = ("observe", "importance", "prune", "save")


@dataclass
class Trial:
    """One architecture, step by step.

    Attributes:
        results: For each step that was tried, "" if it works, or else the message of the refusal.
        broken: The steps that raised an error that is not ours.
    """

    model: nn.Module
    batch: Inputs
    results: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of some work, or None if it raises."""
        try:
            result = work()
        except HeadwiseError as error:
            self.results[name] = str(error)
            return None
        except Exception as error:  # any other error is a defect of this library
            self.broken[name] = f"{type(error).__name__}: {error}"
            return None
        self.results[name] = ""
        return result


def try_out(case: ArchitectureCase, steps: tuple[str, ...] = STEPS) -> Trial:
    """Observe a model, score its heads, prune one group of each layer, and save that."""
    trial = Trial(*case.make())
    model, reference = trial.model, [trial.batch]
    table = trial.step("observe", lambda: _observed(model, trial.batch))
    if "importance" in steps:
        trial.step("importance", lambda: _scored(model, reference))
    if "prune" in steps and table is not None:
        plan = [head for layer in _layers(table) for head in _removed(table, layer)]
        small = trial.step("prune", lambda: hw.prune(model, plan, reference=reference, expand=True))
        if "save" in steps and small is not None:
            trial.step("save", lambda: _saved(small, reference))
    return trial


@torch.no_grad()
def _observed(model: nn.Module, batch: Inputs) -> hw.HeadTable:
    """The table of a model; watching must not change its output."""
    with torch.random.fork_rng():
        plain = _floats(model(**batch))
    with torch.random.fork_rng(), hw.observe(model) as watch:
        watched = _floats(model(**batch))
    pairs = zip(plain, watched, strict=True)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
    return watch.table()


def _scored(model: nn.Module, reference: list[Inputs]) -> None:
    scores = hw.importance(model, reference, loss=_loss)
    assert np.isfinite(scores.importance).all()


def _saved(small: nn.Module, reference: list[Inputs]) -> None:
    """Save a model; this process opens it for the comparison, because a fresh one takes long."""
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(_save, "answer_in_fresh_process", answer_in_this_process),
    ):
        hw.save(small, Path(folder) / "small", reference=reference)


def answer_in_this_process(reader: str, folder: Path, batch: Any = ()) -> list[Tensor]:
    """The outputs of a checkpoint that is opened here."""
    return _save.float_outputs(hw.load(folder), batch)


def _loss(output: Any, batch: Inputs) -> Tensor:
    """The mean square of the first output that has a row for each text."""
    rows = len(next(x for x in batch.values() if isinstance(x, Tensor) and x.ndim))
    first = next(x for x in _floats(output) if x.ndim > 1 and len(x) == rows)
    return first.flatten(1).square().mean(1)


def _floats(output: Any) -> list[Tensor]:
    values = [output] if isinstance(output, Tensor) else [*output.values()]
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def _layers(table: hw.HeadTable) -> Iterator[list[int]]:
    """The rows of each layer."""
    layers: dict[tuple[str, int], list[int]] = {}
    for row, head in enumerate(table.heads):
        layers.setdefault((head.stack, head.layer), []).append(row)
    yield from layers.values()


def _removed(table: hw.HeadTable, rows: list[int]) -> list[hw.Head]:
    """The heads of the first of several kv heads, or the first of several heads."""
    kv_heads = table.kv_heads[rows]
    if kv_heads.max() > 0:
        return [table.heads[row] for row in rows if table.kv_heads[row] == 0]
    return [table.heads[rows[0]]] if len(rows) > 1 else []
