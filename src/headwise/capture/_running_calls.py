"""The modules of a model that run at the moment, as the stack of frames says.

A function of torch is not told which module calls it, and the interface of transformers not what
its module was called with. Hooks could tell both, but they would have to stand at every module,
before and after each call, also in passes that a watch leaves out: 3 us a module, and compiled
code guards them. Frames are read only where a call is captured, and nothing is written to them.
"""

import inspect
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from torch import Tensor, nn

from headwise._torch_private import MODULE_CALL

# Parts of the names of arguments that are another text, as in cross-attention.
_CONTEXT = ("encoder", "context", "memory", "cross", "key", "source", "kv")
Calls = tuple["ModuleCall", ...]


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        queries: The queries of its latest attention call.
        number: Tells it apart from all others.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queries: Tensor | None = None
    number: int = field(default_factory=count(1).__next__)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The arguments that may be token vectors: float tensors with three axes."""
        values = *self.args, *self.kwargs.values()
        return [
            x for x in values if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
        ]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the token vectors that the module receives; None if that is unknown."""
        return tuple(self.inputs[0].shape) if self.inputs else None

    @property
    def n_ids(self) -> int | None:
        """The length of the first argument that may be token ids; None if none may."""
        tensors = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))
        ids = (x for x in tensors if x.ndim == 2 and not x.is_floating_point())
        return next((x.shape[1] for x in ids), None)

    def is_cross_attention(self, T: int, S: int) -> bool | None:
        """Whether `S` keys come from another text than `T` queries; None if that is unknown.

        More keys than queries are not enough: keys of the same text may come from a cache.
        """
        if not self.inputs:
            return None
        first, *others = self.inputs
        if others and first is others[0]:
            return False
        # Embeddings of positions are as long as the text that they are added to.
        if any(x.shape[1] == S and (S != T or self._is_context(x)) for x in others):
            return True
        return False if first.shape[1] == T else None

    def _is_context(self, x: Tensor) -> bool:
        """Whether the name of an argument says that it is another text."""
        parameters = inspect.signature(self.module.forward).parameters
        names = [name for name, value in self.kwargs.items() if value is x]
        names += [name for name, value in zip(parameters, self.args, strict=False) if value is x]
        return any(part in name for name in names for part in _CONTEXT)


def running_calls(modules: Container[int], known: Calls = ()) -> Calls:
    """The calls of some modules that have not returned, the innermost first.

    Args:
        modules: Their identities.
        known: The calls that ran a moment ago. Those that still run are the same objects, so that
            two attention calls within one call of a module share it.
    """
    calls: list[ModuleCall] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            variables = frame.f_locals
            module, kwargs = variables["self"], variables["kwargs"]  # each call has its own kwargs
            for i, call in enumerate(known):
                if call.kwargs is kwargs:
                    return (*calls, *known[i:])  # what runs around it is the same, too
            if id(module) in modules:
                calls.append(ModuleCall(module, variables["args"], kwargs))
        frame = frame.f_back
    return tuple(calls)
