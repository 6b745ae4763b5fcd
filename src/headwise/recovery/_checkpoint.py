"""The state of a recovery, in a file from which an interrupted one resumes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise._checkpoint import Checkpoint, kind_of_tensor

# The optimizer state of AdamW for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_LOSSES = "losses"


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
        about = {"headwise_recovery": "1", **about}
        self._file = Checkpoint(path, about, "recover", "recovery is")
        self._weights, self._optimizer = weights, optimizer

    def resume(self, steps: int) -> None:
        """Take over the state in the file, if there is one.

        Raises:
            InputError: the file is damaged, or about another run. Nothing is changed then.
        """
        stored = self._file.read()
        if stored is None:
            return
        losses = self._take(stored, _LOSSES, None)
        if losses.dtype != torch.float64 or losses.ndim != 1 or not 1 <= len(losses) <= steps:
            self._file.refuse(f"its losses are {kind_of_tensor(losses)}, of {steps} steps at most")
        values = [self._take(stored, f"weight.{n}", w) for n, w in enumerate(self._weights)]
        # A weight that the loss does not depend on has no moments.
        state = {
            n: self._moments_of(stored, n, w)
            for n, w in enumerate(self._weights)
            if any(f"{name}.{n}" in stored for name in _MOMENTS)
        }
        if any(float(moments["step"]) != len(losses) for moments in state.values()):
            self._file.refuse(f"its optimizer is not at step {len(losses)}")
        if stored:
            self._file.refuse(f"it holds {min(stored)} besides")
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
        if self._file.is_due:
            self.save()

    def save(self) -> None:
        """Write the state of the steps that are done.

        Raises:
            OutputError: the file cannot be written.
        """
        tensors = {f"weight.{n}": w.detach() for n, w in enumerate(self._weights)}
        for number, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{number}": moments[name] for name in _MOMENTS}
        tensors[_LOSSES] = torch.tensor(self.losses, dtype=torch.float64)
        self._file.write(tensors)

    def _moments_of(
        self, stored: dict[str, Tensor], number: int, weight: Tensor
    ) -> dict[str, Tensor]:
        scalar = torch.zeros((), dtype=torch.float32)
        moments = {
            name: self._take(stored, f"{name}.{number}", scalar if name == "step" else weight)
            for name in _MOMENTS
        }
        if moments["exp_avg_sq"].min() < 0:
            self._file.refuse(f"exp_avg_sq.{number} holds {moments['exp_avg_sq'].min().item()}")
        return moments

    def _take(self, stored: dict[str, Tensor], name: str, like: Tensor | None) -> Tensor:
        """Remove a tensor from those that were stored, after a check of its shape and values."""
        if name not in stored:
            self._file.refuse(f"it lacks {name}")
        tensor = stored.pop(name)
        if like is not None and kind_of_tensor(tensor) != kind_of_tensor(like):
            self._file.refuse(f"{name} is {kind_of_tensor(tensor)}, not {kind_of_tensor(like)}")
        if not tensor.isfinite().all():
            self._file.refuse(f"{name} is not finite")
        return tensor
