"""A short name for the weights of a model."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """A hash of every weight, its name, shape and dtype: equal for equal models only.

    Devices don't count. Returns 16 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        whole = tensor.detach().cpu().contiguous().flatten()
        digest.update(whole.view(torch.uint8).numpy())
    return digest.hexdigest()
