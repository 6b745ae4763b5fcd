"""Devices: that of a model's inputs, and whether one can be used."""

import warnings
from typing import Any

import torch
from torch import nn

from headwise.errors import ArgumentError


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


def check_device(device: str | torch.device, option: str) -> torch.device:
    """The device, after a tensor was written to it and read back.

    Raises:
        ArgumentError: it cannot be used on this machine; the message names the `option`.
    """
    try:
        with warnings.catch_warnings():  # deprecated device names warn
            warnings.simplefilter("ignore")
            probe = torch.zeros(1, device=device)
            probe.cpu()  # fails on the meta device
            return probe.device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ArgumentError(
            f"{option}: {str(device)!r} cannot be used here ({reason}). Leave it out for the CPU."
        ) from error
