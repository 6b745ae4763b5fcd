"""The checkpoint file of a recovery, from which an interrupted one resumes."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from headwise._tensors import check_metadata, read_with_metadata, write_tensors
from headwise.errors import InputError
from headwise.files import write_beside

# The least seconds between two writes, and how much longer a run computes than it writes.
_SECONDS, _COMPUTE_PER_WRITE = 30.0, 20.0
# The optimizer state of AdamW for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_LOSSES = "losses"
_ADVICE = "Name another file, or delete it to start again."


class RecoveryCheckpoint:
    """The weights in training, the optimizer's moments, and the loss of each step.

    Attributes:
        losses: The loss of each step that is done.

    Args:
        path: The file. None keeps nothing.
        about: The models, batches and settings of the run. A file about others is refused.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, str],
        weights: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.losses: list[float] = []
        self._path, self._about = path, {"headwise_recovery": "1", **about}
        self._weights, self._optimizer = weights, optimizer
        self._due = time.monotonic() + _SECONDS

    def resume(self, steps: int) -> None:
        """Take over the state in the file, if there is one.

        Raises:
            InputError: the file is damaged, or about another run. Nothing is changed then.
        """
        if self._path is None or not self._path.exists():
            return
        stored = self._read(self._path)
        losses = self._take(stored, _LOSSES, None)
        if losses.dtype != torch.float64 or losses.ndim != 1 or not 1 <= len(losses) <= steps:
            self._refuse(f"its losses are {_kind(losses)}, of {steps} steps at most")
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
        self.losses[:] = losses.tolist()

    def save_if_due(self) -> None:
        """Write the state if the last write was some time ago.

        Raises:
            OutputError: the file cannot be written.
        """
        if time.monotonic() > self._due:
            self.save()

    def save(self) -> None:
        """Write the state of the steps that are done.

        Raises:
            OutputError: the file cannot be written.
        """
        if self._path is None:
            return
        started = time.monotonic()
        tensors = {f"weight.{n}": w.detach() for n, w in enumerate(self._weights)}
        for number, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{number}": moments[name] for name in _MOMENTS}
        tensors[_LOSSES] = torch.tensor(self.losses, dtype=torch.float64)
        with write_beside(self._path) as beside:
            write_tensors(tensors, beside, self._about)
        seconds = time.monotonic() - started
        self._due = time.monotonic() + max(_SECONDS, _COMPUTE_PER_WRITE * seconds)

    def _read(self, path: Path) -> dict[str, Tensor]:
        tensors, metadata = read_with_metadata(
            path, "recover", "holds no unfinished recovery", _ADVICE
        )
        says = f"recover: the unfinished recovery in {path} has"
        check_metadata(metadata, self._about, says, _ADVICE)
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
            f"recover: the unfinished recovery in {self._path} is broken ({reason}). {_ADVICE}"
        )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
