"""From the residual stream to logits: the unembedding, and the last norm before it."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.models import hooked


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output; None if it has none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def find_unembedding(
    model: nn.Module, inputs: dict[str, Any]
) -> tuple[nn.Module, Tensor, nn.Module | None] | None:
    """The last module with a matrix, if its outputs are as many as the logits; its input, and the
    norm that this comes from.

    Found by what modules return in one pass, since names differ between families.
    """
    calls: list[tuple[nn.Module, Any, Any]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        calls.append((module, args[0] if args else None, output))

    leaves = (module for module in model.modules() if not any(module.children()))
    with hooked(after=[(x, record) for x in leaves if has_matrix(x) or is_norm(x)]):
        logits = logits_of(model(**inputs))
    module, x, y = next((call for call in reversed(calls) if has_matrix(call[0])), (model, None, 0))
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or logits is None:
        return None
    norm, _, normed = next((call for call in reversed(calls) if is_norm(call[0])), (None, x, None))
    is_last = isinstance(normed, Tensor) and torch.equal(normed, x)  # it may have been sliced
    return (module, x, norm if is_last else None) if y.shape[-1] == logits.shape[-1] else None


def has_matrix(module: nn.Module) -> bool:
    """Whether a module itself multiplies by a matrix, or holds one."""
    if isinstance(module, nn.Linear):  # one with a single output is a gate
        return True
    # Positions that are not learned are buffers.
    weights = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(sum(size > 1 for size in weight.shape) > 1 for weight in weights)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not any(module.children())


@torch.no_grad()
def gain_and_bias(
    norm: nn.Module, like: Float[Tensor, "... d_model"]
) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"]]:
    """What a norm multiplies each coordinate of a vector of unit size by, and adds to it.

    Found by what it does, since families differ in what they multiply by: 1 + weight in some.
    """
    width = like.shape[-1]
    # Of mean 0 and mean square 1, without zeros: norms leave it as it is.
    signs = torch.tensor([1.0, -1.0]).repeat(width // 2)
    odd = torch.tensor([1.0, (3**0.5 - 1) / 2, -(3**0.5 + 1) / 2])
    unit = (signs if width % 2 == 0 else torch.cat([signs[: width - 3], odd])).to(like)
    up, down = norm.forward(unit), norm.forward(-unit)
    return (up - down) / (2 * unit), (up + down) / 2
