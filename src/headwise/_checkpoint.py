"""The file of unfinished work, from which an interrupted run resumes."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from headwise._tensors import read_with_metadata, write_tensors
from headwise.errors import InputError
from headwise.files import write_beside

# The least seconds between two writes, which is the most work that a killed process loses, and how
# much longer a run computes than it writes.
_SECONDS, _COMPUTE_PER_WRITE = 5.0, 20.0
# The optimizer state of AdamW for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TrainingCheckpoint:
    """The file of a training: its weights, the moments of AdamW, and the loss of each step.

    Args:
        path: The file. None keeps nothing.
        about: The models, texts and settings of the training. A file about others is refused.
        function: The function that trains, for errors.
        work: What the file holds, such as `unfinished recovery`.
        place: What else the user can name, in errors: another file, or a folder.

    Attributes:
        losses: The loss of each step that is done.
        seconds: What the steps took, if the caller counts it.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, str],
        weights: Iterable[Tensor],
        optimizer: torch.optim.AdamW,
        function: str,
        work: str,
        place: str = "file",
    ) -> None:
        self.losses: list[float] = []
        self.seconds = 0.0
        self._path, self._about, self._function, self._work = path, about, function, work
        self._weights, self._optimizer = [*weights], optimizer
        self._advice = f"Name another {place}, or delete the file to start again."
        self._due = time.monotonic() + _SECONDS

    def resume(self, steps: int) -> None:
        """Take over the state in the file, if there is one.

        The optimizer's fused kernel does not check the shape and dtype of its state; this does.

        Raises:
            InputError: the file is damaged, or about another run. Nothing is changed then.
        """
        if self._path is None or not self._path.exists():
            return
        stored = self._read(self._path)
        losses = stored.get("losses", torch.zeros(()))
        if losses.dtype != torch.float64 or losses.ndim != 1 or not 1 <= len(losses) <= steps:
            self._refuse(f"losses is {_kind(losses)}, of {steps} steps at most")
        self._check(stored, losses)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            kind, _, number = name.rpartition(".")
            if kind in _MOMENTS:
                state.setdefault(int(number), {})[kind] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        with torch.no_grad():
            for n, weight in enumerate(self._weights):
                weight.copy_(stored[f"weight.{n}"])
        self.losses[:], self.seconds = losses.tolist(), stored["seconds"].item()

    def _check(self, stored: Mapping[str, Tensor], losses: Tensor) -> None:
        """Refuse tensors that are not those of this training after the steps of these losses."""
        expected = {"losses": losses, "seconds": torch.zeros((), dtype=torch.float64)}
        for n, weight in enumerate(self._weights):
            expected[f"weight.{n}"] = weight
            # A weight that the loss does not depend on has no moments.
            if any(f"{name}.{n}" in stored for name in _MOMENTS):
                step = torch.tensor(float(len(losses)))
                expected |= {f"exp_avg.{n}": weight, f"exp_avg_sq.{n}": weight, f"step.{n}": step}
        for name in sorted(stored.keys() | expected.keys()):
            has, needs = (_kind(x[name]) if name in x else "" for x in (stored, expected))
            if has != needs:
                self._refuse(f"{name} is {has or 'missing'}, not {needs or 'of this training'}")
            tensor = stored[name]
            if not tensor.isfinite().all() or (name.startswith("exp_avg_sq") and tensor.min() < 0):
                self._refuse(f"{name} is not finite, or below 0")
            if name.startswith("step") and tensor != len(losses):
                self._refuse(f"{name} is {tensor.item()} after {len(losses)} losses")

    def save_if_due(self, steps: int) -> None:
        """Write the state if the last write was some time ago, or so many steps are done.

        Raises:
            OutputError: the file cannot be written.
        """
        if len(self.losses) == steps or time.monotonic() > self._due:
            self.save()

    def save(self) -> None:
        """Write the state of the steps that are done; the file is whole at any time.

        Raises:
            OutputError: the file cannot be written.
        """
        if self._path is None:
            return
        tensors = {f"weight.{n}": w.detach() for n, w in enumerate(self._weights)}
        for number, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{number}": moments[name] for name in _MOMENTS}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        tensors["seconds"] = torch.tensor(self.seconds, dtype=torch.float64)
        started = time.monotonic()
        with write_beside(self._path) as beside:
            write_tensors(tensors, beside, self._about)
        now = time.monotonic()
        self._due = now + max(_SECONDS, _COMPUTE_PER_WRITE * (now - started))

    def _read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a file that is about this training."""
        problem = f"holds no {self._work}"
        tensors, about = read_with_metadata(path, self._function, problem, self._advice)
        for name, value in self._about.items():
            if about.get(name) != value:
                raise InputError(
                    f"{self._function}: the {self._work} in {path} is of "
                    f"{name}={about.get(name)!r}, not {value!r}. {self._advice}"
                )
        return tensors

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(
            f"{self._function}: the {self._work} in {self._path} is broken ({reason}). "
            f"{self._advice}"
        )


def _kind(tensor: Tensor) -> str:
    """The shape and the dtype of a tensor, for errors."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
