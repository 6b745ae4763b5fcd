"""A module of a model while it is called, and what its inputs say about its attention."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from headwise._count_names import HEADS
from headwise.models.capture._call import AttentionCall


def heads_of(module: nn.Module) -> int:
    """The number of heads that a module declares; 1 if it declares none."""
    counts = [getattr(module, name, None) for name in (*HEADS, "nhead")]
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        inputs: The arguments that may be token vectors: float tensors with three axes.
        n_ids: The number of token ids in a row, if it receives ids.
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
    n_ids: int | None = None
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


def input_shape(module_call: ModuleCall | None) -> tuple[int, ...] | None:
    """The shape of the token vectors that a module receives; None if that is unknown."""
    return None if module_call is None or not module_call.inputs else module_call.inputs[0].shape


def reason_unsupported(
    call: AttentionCall, module_call: ModuleCall | None, around: Iterable[ModuleCall]
) -> str | None:
    """Why a call is not attention between the tokens of a text; None if it is.

    The shapes of the module's inputs decide: a layer that receives windows attends within texts.

    Args:
        around: The calls of all modules that are active.
    """
    shape = input_shape(module_call)
    if shape is None:
        return None
    B, H, T, S = *call.q.shape[:3], call.k.shape[2]
    among = f"not supported: attends among {T} positions where it was given {shape[1]} tokens"
    if shape[1] > T and T not in shape and _are_chunks(call.module, H):
        return among
    if T in shape[1:] or any(outer.n_ids == T for outer in around):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return f"not supported: attends among {T} channels of each head, not among tokens"
    if shape[1] != S and (shape[1] == H or B * T == shape[0] * shape[1] == B):
        return f"not supported: attends among {S} positions for each of {shape[1]} tokens"
    windows = shape[0] * shape[1] == B * T
    return among if shape[1] > T and T == S and not windows else None


def _are_chunks(module: nn.Module, H: int) -> bool:
    """Whether `H` heads are several chunks of the heads that a module declares."""
    heads = heads_of(module)
    return 1 < heads < H and H % heads == 0
