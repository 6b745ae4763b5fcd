"""Models that `torch.compile` has compiled: what they wrap, and how hooks on them run."""

from collections.abc import Iterator

import torch
from torch import nn

from headwise._interrupts import reversible
from headwise._torch_private import is_compiler_loaded


def without_compiler(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, which shares its weights; else the model itself."""
    inner = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
    return model if inner is None else inner


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of a model, or of a module in it, run compiled code."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@reversible
def run_uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled while the block runs: it would not call new hooks."""
    if not is_compiler_loaded():  # nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
