"""Temporary hooks on the modules of a model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from headwise._interrupts import reversible

Function = Callable[..., Any]


class Hooks(ExitStack):
    """Hooks that are removed when the block ends.

    A hook that remains on a module nevertheless does nothing; neither does the hook of a copied
    or pickled module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[_Hook] = []

    def before(self, module: nn.Module, function: Function, **options: Any) -> None:
        """Call `function` before each call of a module; options of `register_forward_pre_hook`."""
        self.callback(module.register_forward_pre_hook(self._new(function), **options).remove)

    def after(self, module: nn.Module, function: Function, **options: Any) -> None:
        """Call `function` after each call of a module; options of `register_forward_hook`."""
        self.callback(module.register_forward_hook(self._new(function), **options).remove)

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
    **options: Any,
) -> Iterator[None]:
    """Call functions before or after each call of their modules while the block runs."""
    with Hooks() as hooks:
        for module, function in before:
            hooks.before(module, function, **options)
        for module, function in after:
            hooks.after(module, function, **options)
        yield


class _Hook:
    def __init__(self, function: Function | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        function = self.function
        return None if function is None else function(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()
