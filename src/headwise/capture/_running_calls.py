"""The modules of a model that run at the moment, as the stack of frames says.

A function of torch is not told which module calls it, and the interface of transformers not what
its module was called with. Hooks could tell both, but they would have to stand at every module,
before and after each call, also in passes that a watch leaves out: 3 us a module, and compiled
code guards them. Frames are read only where a call is captured, and nothing is written to them.
"""

import inspect
from collections.abc import Container, Iterator
from itertools import count
from typing import Any

from torch import Tensor, nn

from headwise._torch_private import MODULE_CALL, is_of_graph

# Parts of the names of arguments that are another text, as in cross-attention.
_CONTEXT = ("encoder", "context", "memory", "cross", "key", "source", "kv")
# How many calls are kept: of a module, of one within it that attends in turn, and of all around.
_KEPT = 3
_numbers = count(1)


class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        shape: The shape of the token vectors that the module receives; None if that is unknown.
        queries: The queries of its latest attention call.
        number: Tells it apart from all others.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.number = next(_numbers)
        self.queries: Tensor | None = None
        vectors = self._vectors()
        self.shape = tuple(vectors[0].shape) if vectors else None

    def _vectors(self) -> list[Tensor]:
        """The arguments that may be token vectors: float tensors with three axes."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return [x for x in tensors if x.ndim == 3 and x.is_floating_point()]

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
        if self.shape is None:
            return None
        first, *others = self._vectors()
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


class RunningCalls:
    """The calls of some modules that have not returned, the innermost first: read when iterated,
    and only as far as that goes, since reading a call takes about 2 us.

    Args:
        modules: Their identities.
    """

    def __init__(self, modules: Container[int]) -> None:
        self._modules = modules
        self._kept: list[ModuleCall] = []

    def __iter__(self) -> Iterator[ModuleCall]:
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                variables = frame.f_locals
                module, kwargs = variables["self"], variables["kwargs"]
                if id(module) in self._modules:
                    known = [call for call in self._kept if call.kwargs is kwargs]
                    yield known[0] if known else ModuleCall(module, variables["args"], kwargs)
            frame = frame.f_back

    def keep(self, call: ModuleCall) -> None:
        """Keep a call, so that it is the same object when it is read again: each has own kwargs."""
        self._kept = [call, *(other for other in self._kept if other is not call)][:_KEPT]

    def clear(self) -> None:
        self._kept = []


def is_in_graph() -> bool:
    """Whether the innermost module that runs does so in a graph that runs function by function."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        if is_of_graph(frame.f_code):
            return True
        frame = frame.f_back
    return False
