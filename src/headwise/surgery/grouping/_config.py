"""The number of key/value heads in the configuration of a Hugging Face model."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise._count_names import CONFIG_KV_HEADS
from headwise.errors import UnsupportedError
from headwise.models.checkpoints import Differences, differences_of


@dataclass(frozen=True)
class KvHeadCount:
    """The number of key/value heads in each layer of a model.

    Attributes:
        name: The name of the number in the configuration.
    """

    name: str
    number: int

    @classmethod
    def of(cls, model: nn.Module) -> "KvHeadCount":
        """Read the number from the configuration of a model.

        Raises:
            UnsupportedError: the configuration has no such number, or does not describe the
                model.
        """
        config: Any = getattr(model, "config", None)
        kind = type(model).__name__
        name = next(
            (name for name in CONFIG_KV_HEADS if type(getattr(config, name, None)) is int), None
        )
        if name is None or not hasattr(config, "to_dict"):
            raise UnsupportedError(
                f"group_heads: {kind} has no {' or '.join(CONFIG_KV_HEADS)} in its configuration, "
                f"so that its heads cannot share keys and values. Remove heads instead, with prune."
            )
        differences = (differences_of(model) or {}).values()
        changed = [name for names in differences for name in names]
        if changed:
            raise UnsupportedError(
                f"group_heads: {kind} differs from its configuration (in {changed[0]}), as after "
                f"heads were pruned. Group its heads first, then prune."
            )
        return cls(name, getattr(config, name))

    def change(self, model: nn.Module, number: int) -> None:
        """Change the number in a model and its configuration.

        Weights that change their shape keep the first part of their values; the caller
        overwrites them.
        """
        config: Any = model.config
        setattr(config, self.name, number)
        differences = Differences.between(_built(model, config), model)
        before = {name: model.get_parameter(name).detach() for name in differences.tensors}
        differences.apply(model)
        with torch.no_grad():
            for name, old in before.items():
                weight = model.get_parameter(name)
                weight.copy_(old[tuple(map(slice, weight.shape))])


def _built(model: nn.Module, config: Any) -> nn.Module:
    with torch.device("meta"):
        return type(model)(deepcopy(config))
