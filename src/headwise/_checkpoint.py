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
        losses = self._take(stored, "losses", None)
        if losses.dtype != torch.float64 or losses.ndim != 1 or not 1 <= len(losses) <= steps:
            self._refuse(f"its losses are {_kind(losses)}, of {steps} steps at most")
        seconds = self._take(stored, "seconds", torch.zeros((), dtype=torch.float64))
        values = [self._take(stored, f"weight.{n}", w) for n, w in enumerate(self._weights)]
        # A weight that the loss does not depend on has no moments.
        state = {
            n: self._moments_of(stored, n, w)
            for n, w in enumerate(self._weights)
            if any(f"{name}.{n}" in stored for name in _MOMENTS)
        }
        if any(float(moments["step"]) != len(losses) for moments in state.values()):
            self._refuse(f"its optimizer is not at step {len(losses)}")
        if stored:
            self._refuse(f"it holds {min(stored)} besides")
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        with torch.no_grad():
            for weight, value in zip(self._weights, values, strict=True):
                weight.copy_(value)
        self.losses[:], self.seconds = losses.tolist(), seconds.item()

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

    def _moments_of(
        self, stored: dict[str, Tensor], number: int, weight: Tensor
    ) -> dict[str, Tensor]:
        scalar = torch.zeros((), dtype=torch.float32)
        moments = {
            name: self._take(stored, f"{name}.{number}", scalar if name == "step" else weight)
            for name in _MOMENTS
        }
        if moments["exp_avg_sq"].min() < 0:
            self._refuse(f"exp_avg_sq.{number} holds {moments['exp_avg_sq'].min().item()}")
        return moments

    def _take(self, stored: dict[str, Tensor], name: str, like: Tensor | None) -> Tensor:
        """Remove a tensor from those that were stored, after a check of its shape and values."""
        if name not in stored:
            self._refuse(f"it lacks {name}")
        tensor = stored.pop(name)
        if like is not None and _kind(tensor) != _kind(like):
            self._refuse(f"{name} is {_kind(tensor)}, not {_kind(like)}")
        if not tensor.isfinite().all():
            self._refuse(f"{name} is not finite")
        return tensor

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(
            f"{self._function}: the {self._work} in {self._path} is broken ({reason}). "
            f"{self._advice}"
        )


def _kind(tensor: Tensor) -> str:
    """The shape and the dtype of a tensor, for errors."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
