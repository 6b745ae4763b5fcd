"""The largest logits of batches that a model will be trained on next."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import batches_of, device_of, rehearse, run_uncompiled
from headwise.monitor._step_statistics import StepStatistics, step_statistics
from headwise.watch import Recorder, Request


class Rehearsal:
    """Runs batches as training will, without gradients and without a trace in the model.

    Args:
        group: The ranks that train on different texts. None is all of them.
    """

    def __init__(
        self, model: nn.Module, layers: Collection[int] | None, group: dist.ProcessGroup | None
    ) -> None:
        self._model, self._group = model, group
        self._recorder = Recorder(model, Request(("max_logit",)), layers, every=1)

    def run(self, batches: list[Any]) -> StepStatistics:
        """The largest logit of each head, over all batches and all ranks.

        Raises:
            UnsupportedError: no attention was captured.
        """
        try:
            with run_uncompiled(), self._recorder.recording():
                rehearse(self._model, batches)
        finally:
            totals = self._recorder.take_totals()
        if not totals:
            raise UnsupportedError(
                f"QKClip.look_ahead: no attention was captured in {type(self._model).__name__}. "
                f"Give the batch that the model is trained on next."
            )
        return step_statistics(totals, device_of(self._model), self._group)

    def is_any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank that takes part in this rank's passes.

        With a group of the monitor, ranks outside of it may have other heads of the same layers.
        """
        if self._group is None or not (dist.is_available() and dist.is_initialized()):
            return condition
        flag = torch.tensor(float(condition), device=device_of(self._model))
        sharded = [weight for weight in self._model.parameters() if hasattr(weight, "device_mesh")]
        for mesh in dict.fromkeys(weight.device_mesh for weight in sharded):
            for axis in range(mesh.ndim):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return bool(flag)


def next_batches(batch: Any, model: nn.Module) -> list[Any]:
    """The batches of a step on the model's device; one batch becomes a list of one.

    Raises:
        ArgumentError: there is none, or one is a text.
    """
    if batch is None:
        raise ArgumentError(
            "QKClip.look_ahead: batch=None. Give the batch that the model is trained on next, as "
            "the model takes it; a list of them where a step accumulates gradients."
        )
    device = device_of(model)
    several = batch if isinstance(batch, list) else [batch]
    return [_moved(x, device) for x in batches_of(several, "QKClip.look_ahead", "batch")]


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple):
        return tuple(_moved(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: _moved(x, device) for name, x in batch.items()}
    return batch
