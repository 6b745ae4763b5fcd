"""Hooks that are on a model for a while, and are no part of it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from headwise._interrupts import reversible

Function = Callable[..., Any]


class Hooks(ExitStack):
    """Hooks that belong to the block that is running, and not to the modules that they are on.

    They are taken off when the block ends. One that is left behind nevertheless does nothing,
    nor does that of a copy of a module, or of what is pickled of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[_Hook] = []

    def before(self, module: nn.Module, function: Function, **how: Any) -> None:
        """Call `function` before each call of a module; `how` as in `register_forward_pre_hook`."""
        self.callback(module.register_forward_pre_hook(self._new(function), **how).remove)

    def after(self, module: nn.Module, function: Function, **how: Any) -> None:
        """Call `function` after each call of a module; `how` as in `register_forward_hook`."""
        self.callback(module.register_forward_hook(self._new(function), **how).remove)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool:
        for hook in self._hooks:
            hook.function = None
        self._hooks.clear()
        return bool(super().__exit__(kind, error, trace))

    def _new(self, function: Function) -> "_Hook":
        hook = _Hook(function)
        self._hooks.append(hook)
        return hook


@reversible
def hooked(
    before: Iterable[tuple[nn.Module, Function]] = (),
    after: Iterable[tuple[nn.Module, Function]] = (),
    **how: Any,
) -> Iterator[None]:
    """Call functions before or after each call of their modules while the block runs."""
    with Hooks() as hooks:
        for module, function in before:
            hooks.before(module, function, **how)
        for module, function in after:
            hooks.after(module, function, **how)
        yield


class _Hook:
    def __init__(self, function: Function | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        function = self.function
        return None if function is None else function(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()
