"""Models that `torch.compile` has compiled: what they wrap, and how hooks on them run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from headwise._torch_private import compiled_modules, is_compiler_loaded, wrapped_by_compiler


def without_compiler(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, which shares its weights; else the model itself."""
    inner = wrapped_by_compiler(model) if isinstance(model, nn.Module) else None
    return model if inner is None else inner


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of a model, or of a module in it, run compiled code."""
    return any(True for _ in compiled_modules(model))


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled while the block runs: it would not call new hooks."""
    if not is_compiler_loaded():  # nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
