"""Rerun only the suffix of a model: blocks before a layer return their recorded outputs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.models import Attention, hooked


class SuffixReplay:
    """The recorded outputs of a model's blocks, which replace the blocks in later passes.

    A block is a member of the outermost `nn.ModuleList` that contains an attention. Where
    attentions share a block, nothing is replayed.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[Attention]) -> None:
        blocks = [_block(model, attention) for attention in attentions]
        self._blocks_before: dict[Attention, list[nn.Module]] = {}
        if None not in blocks and not any(attention.nth for attention in attentions):
            # Attentions are in the order of their calls, and so are their blocks.
            for index, attention in enumerate(attentions):
                earlier = {block for block in blocks[:index] if block is not None}
                self._blocks_before[attention] = list(earlier - {blocks[index]})
        self._outputs: dict[nn.Module, Any] = {}

    @reversible
    def recording(self) -> Iterator[None]:
        """Record the output of each block in the last pass of the model."""

        def record(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[module] = output

        blocks = {block for earlier in self._blocks_before.values() for block in earlier}
        with hooked(after=[(block, record) for block in blocks]):
            yield

    @reversible
    def before(self, attention: Attention) -> Iterator[None]:
        """Make the blocks before an attention's own return their recorded outputs."""
        with ExitStack() as stack:
            for block in self._blocks_before.get(attention, ()):
                output = self._outputs[block]
                # Accelerate keeps a function of its own there.
                before = {name: x for name, x in block.__dict__.items() if name == "forward"}
                block.__dict__["forward"] = lambda *_, output=output, **__: _copied(output)
                stack.callback(block.__dict__.update, before)
                stack.callback(block.__dict__.pop, "forward")
            yield

    def forget(self) -> None:
        """Replay nothing from now on."""
        self._blocks_before.clear()
        self._outputs.clear()


def _block(model: nn.Module, attention: Attention) -> nn.Module | None:
    parts = attention.site.name.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return model.get_submodule(".".join(parts[: end + 1]))
    return None


def _copied(output: Any) -> Any:
    """A copy, since the next module may write into its input."""
    if isinstance(output, Tensor):
        return output.clone()
    if type(output) in (tuple, list):
        return type(output)(_copied(part) for part in output)
    return output
