"""Which outputs of modules a head depends on, found by gradients."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def output_dependence(
    heads: Float[Tensor, "n ..."], outputs: Mapping[str, Sequence[Tensor]]
) -> dict[str, Bool[Tensor, "n _"]]:
    """Which outputs of each module each head depends on, by the last axis of the module.

    Args:
        heads: What is computed for each head, attached in autograd to the outputs.
        outputs: What the calls of each module returned.
    Returns:
        The modules that any head depends on, in the order of `outputs`.
    """
    if not heads.requires_grad:
        return {}
    calls = [(name, output) for name, tensors in outputs.items() for output in tensors]
    tensors = [output for _, output in calls]
    # Random factors, since gradients could cancel under equal ones; the same in each run.
    factors = torch.randn(heads.shape[1:], generator=torch.Generator().manual_seed(0)).to(heads)
    rows = [
        torch.autograd.grad((head * factors).sum(), tensors, retain_graph=True, allow_unused=True)
        for head in heads
    ]
    used: dict[str, Tensor] = {}
    for (name, _), grads in zip(calls, zip(*rows, strict=True), strict=True):
        if grads[0] is None:  # heads are parts of one tensor: without one gradient there is none
            continue
        units = torch.stack([(grad != 0).flatten(0, -2).any(0) for grad in grads]).cpu()
        used[name] = used[name] | units if name in used else units
    return used
