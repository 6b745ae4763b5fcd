"""Start a model in the middle: blocks before a head give again what they gave."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.models import Attention, hooked


class Replay:
    """What the blocks of a model gave in one pass, to be given again in others.

    A block is a member of the outermost `nn.ModuleList` that an attention lies in. Where
    attentions share a block, nothing is replayed.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[Attention]) -> None:
        blocks = [_block(model, attention) for attention in attentions]
        self._before: dict[Attention, list[nn.Module]] = {}
        if None not in blocks and not any(attention.nth for attention in attentions):
            # The attentions stand in the order of their calls, and so do their blocks.
            for at, attention in enumerate(attentions):
                earlier = {block for block in blocks[:at] if block is not None} - {blocks[at]}
                self._before[attention] = list(earlier)
        self._given: dict[nn.Module, Any] = {}

    @reversible
    def recording(self) -> Iterator[None]:
        """Note what each block gives in the last pass of the model."""

        def note(module: nn.Module, args: Any, output: Any) -> None:
            self._given[module] = output

        blocks = {block for before in self._before.values() for block in before}
        with hooked(after=[(block, note) for block in blocks]):
            yield

    @reversible
    def before(self, attention: Attention) -> Iterator[None]:
        """Let the blocks before an attention's own give what they gave, and compute nothing."""
        with ExitStack() as stack:
            for block in self._before.get(attention, ()):
                given = self._given[block]
                block.__dict__["forward"] = lambda *_, given=given, **__: _copied(given)
                stack.callback(block.__dict__.pop, "forward")
            yield

    def forget(self) -> None:
        """Replay nothing from now on."""
        self._before.clear()
        self._given.clear()


def _block(model: nn.Module, attention: Attention) -> nn.Module | None:
    parts = attention.site.name.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return model.get_submodule(".".join(parts[: end + 1]))
    return None


def _copied(given: Any) -> Any:
    """A copy: what comes next may write into it."""
    if isinstance(given, Tensor):
        return given.clone()
    if type(given) in (tuple, list):
        return type(given)(_copied(part) for part in given)
    return given
