"""The device that a model's inputs belong on."""

from typing import Any

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of the first weight, or where Accelerate runs a model that it has offloaded."""
    weights = [*model.parameters()]
    devices = [weight.device for weight in weights if not weight.is_meta]
    if len(devices) == len(weights) and devices:
        return devices[0]
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in (hook, *getattr(hook, "hooks", ())):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return devices[0] if devices else torch.device("cpu")
