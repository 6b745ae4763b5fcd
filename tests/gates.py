"""A gate on the output of each head, as a test states it: 1 keeps a head, 0 removes it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from headwise.ownership import Attention, edit_heads


@contextmanager
def gate_heads(
    model: nn.Module, attentions: Sequence[Attention], gates: Callable[[Attention], Tensor | None]
) -> Iterator[None]:
    """Multiply the outputs of heads by gates, of `[H]` or of `[B, H]`; None leaves them as are."""

    def edit(attention: Attention, heads: Tensor) -> Tensor:
        gate = gates(attention)
        if gate is None:
            return heads
        gate = gate.to(heads.dtype)
        gate = gate if gate.ndim == 1 else gate.view(len(gate), *[1] * (heads.ndim - 3), -1)
        return heads * gate[..., None]

    with edit_heads(model, attentions, edit):
        yield
