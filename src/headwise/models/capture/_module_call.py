"""A module of a model while it is called."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        inputs: The arguments that may be token vectors: float tensors with three axes.
        has_own_hook: Whether a hook on the module itself captures its attention.
        queries: The queries of its latest attention call.
        thread: The thread it runs in; 0 in compiled code, which cannot know its thread.
        projected: The inputs that an inner module received as its first input.
        counted: The sites whose tokens were counted during this call.
        attended: The number of attention calls during this call.
    """

    module: nn.Module
    inputs: list[Tensor]
    has_own_hook: bool
    projected: list[Tensor] = field(default_factory=list)
    queries: Tensor | None = None
    thread: int = 0
    counted: set[Hashable] = field(default_factory=set)
    attended: int = 0

    def project(self, inputs: list[Tensor]) -> None:
        """An inner module is called: its first input may be one of these inputs."""
        if inputs and any(inputs[0] is x for x in self.inputs):
            self.projected.append(inputs[0])

    def is_cross_attention(self, T: int, S: int) -> bool | None:
        """Whether `S` keys come from another text than `T` queries; None if that is unknown.

        They do if a projection inside the module received an argument other than the first.
        More keys than queries are not enough: keys of the same text may come from a cache.
        """
        if len(self.inputs) > 1 and self.inputs[0] is self.inputs[1]:
            return False
        if any(x.shape[1] == S and (S != T or self._is_context(x)) for x in self.inputs[1:]):
            return True
        return False if self.projected else None

    def _is_context(self, x: Tensor) -> bool:
        return x is not self.inputs[0] and any(x is projected for projected in self.projected)
