"""Function modes and tensor subclasses: contexts without them, and the stack of modes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which functions of torch reach no function mode and no tensor subclass."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def without_tensor_subclasses() -> AbstractContextManager[None]:
    """A context in which functions of torch reach no tensor subclass; function modes stay."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def has_function_modes() -> bool:
    """Whether any function mode is active in this thread."""
    return torch._C._len_torch_function_stack() > 0


def push_function_mode(mode: Any) -> None:
    """Make a function mode the innermost one."""
    modes: Any = torch.overrides  # its functions bear no types
    modes._push_mode(mode)


def pop_function_mode() -> Any:
    """Remove the innermost function mode and return it."""
    modes: Any = torch.overrides
    return modes._pop_mode()


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to everything in nested tuples, lists and dictionaries."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)
