"""Which modules of a model are running while something is heard."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


class Running:
    """Which module of a model is running, and whether its attention is heard elsewhere."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.heard_elsewhere = 0

    @contextmanager
    def follow(self, model: nn.Module, elsewhere: tuple[type[nn.Module], ...]) -> Iterator[None]:
        """Keep count while the model runs; modules of types `elsewhere` are heard by themselves."""
        with ExitStack() as stack:
            for module in model.modules():
                quiet = isinstance(module, elsewhere)
                before = module.register_forward_pre_hook(partial(self._enter, quiet))
                after = module.register_forward_hook(partial(self._leave, quiet), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, quiet: bool, module: nn.Module, *_: Any) -> None:
        self.modules.append(module)
        self.heard_elsewhere += quiet

    def _leave(self, quiet: bool, module: nn.Module, *_: Any) -> None:
        while self.modules and self.modules.pop() is not module:
            pass  # modules that an exception left
        self.heard_elsewhere -= quiet
