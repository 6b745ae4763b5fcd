"""The number of kv heads of a model of Hugging Face: found in its configuration, and changed."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.errors import UnsupportedError
from headwise.models.checkpoints import Differences, differences_of

# What configurations call it.
_NAMES = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class KvHeads:
    """How many kv heads each layer of a model has.

    Attributes:
        name: What its configuration calls the number.
    """

    name: str
    number: int

    @classmethod
    def of(cls, model: nn.Module) -> "KvHeads":
        """The number that the configuration of a model tells.

        Raises:
            UnsupportedError: it tells none, or does not describe the model.
        """
        config: Any = getattr(model, "config", None)
        kind = type(model).__name__
        name = next((name for name in _NAMES if type(getattr(config, name, None)) is int), None)
        if name is None or not hasattr(config, "to_dict"):
            raise UnsupportedError(
                f"group_heads: {kind} has no {' or '.join(_NAMES)} in its configuration, so that "
                f"its heads cannot share keys and values. Remove heads with headwise.prune instead."
            )
        told = [one for changed in (differences_of(model) or {}).values() for one in changed]
        if told:
            raise UnsupportedError(
                f"group_heads: {kind} is not what its configuration says ({told[0]} is another), "
                f"as when heads were cut out of it. Group its heads first, and prune then."
            )
        return cls(name, getattr(config, name))

    def change(self, model: nn.Module, number: int) -> None:
        """Let a model and its configuration have another number.

        Weights that change their shape hold the first of their old numbers: they are to be written.
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
