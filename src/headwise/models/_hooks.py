"""Temporary changes: hooks on the modules of a model, and settings of the whole process.

Context managers with `finally` undo them, so an interrupt (Ctrl-C) inside a block restores
everything. Python may also raise one between two lines of entering or leaving a block, where no
`finally` helps. What that leaves does nothing once its block is gone, with the exception at the
latest, and the next capture of the model removes it (`clear_leftovers`).
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import is_
from types import TracebackType
from typing import Any, no_type_check

import torch
from torch import nn

from headwise._torch_private import (
    always_call_after,
    compiler_stance,
    is_traced_by_compiler,
    remove_hooks,
    set_compiler_stance,
)

Function = Callable[..., Any]


class Block:
    """Stands for a `with` block that runs. Others know it by a weak reference, which tells whether
    the block has ended, however it ended."""


class Hooks(ExitStack):
    """Hooks that are removed when the block ends.

    A hook that remains on a module nevertheless does nothing; neither does the hook of a copied
    or pickled module. Compiled code would not call new hooks, and compiling them takes minutes, so
    while there are hooks everything runs uncompiled.

    Args:
        compiled: Whether compiled code may run, without calling the hooks.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        self._compiled = compiled
        self._block = Block()
        self._registered: list[tuple[nn.Module, _Hook]] = []

    def before(self, module: nn.Module, function: Function, **options: Any) -> None:
        """Call `function` before each call of a module; options of `register_forward_pre_hook`."""
        module.register_forward_pre_hook(self._new(module, function), **options)

    def after(
        self, module: nn.Module, function: Function, always_call: bool = False, **options: Any
    ) -> None:
        """Call `function` after each call of a module; options of `register_forward_hook`."""
        hook = self._new(module, function)
        if always_call:
            always_call_after(module, hook)
        else:
            module.register_forward_hook(hook, **options)

    def once(self, module: nn.Module, function: Function) -> None:
        """Call `function` before the next call of a module, and then no more."""

        def call(*args: Any) -> None:
            remove_hooks(module, partial(is_, hook))
            function(*args)

        hook = self._new(module, call)
        module.register_forward_pre_hook(hook)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool:
        self._block = Block()  # which ends the former one, and all its hooks with it
        try:
            for module, hook in self._registered:
                remove_hooks(module, partial(is_, hook))
            self._registered.clear()  # only now: after an interrupt, a second call goes on
        finally:
            suppresses = super().__exit__(kind, error, trace)
        return bool(suppresses)

    def _new(self, module: nn.Module, function: Function) -> "_Hook":
        if not (self._registered or self._compiled):
            self.enter_context(_stance.changed())
        hook = _Hook(weakref.ref(self._block), function)
        # Noted before it is registered, so that an interrupt in between leaves nothing.
        self._registered.append((module, hook))
        return hook


@contextmanager
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
    def __init__(
        self,
        block: Callable[[], Block | None] = lambda: None,
        function: Function | None = None,
    ) -> None:
        self.block, self.function = block, function

    @no_type_check  # which a compiler cannot trace
    def __call__(self, *args):
        if is_traced_by_compiler():
            return None
        function = self.function
        return None if function is None or self.block() is None else function(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


class SharedSetting:
    """A setting of the whole process: changed for the first of the blocks that need it changed,
    restored after the last."""

    all: "list[SharedSetting]" = []  # noqa: RUF012 - every instance, for `clear_leftovers`

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], object], value: Any) -> None:
        self._get, self._set, self._value = get, set, value
        # A block may be collected, and left, while another is entered in the same thread.
        self._lock = threading.RLock()
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self.original: Any = None  # the latest value to restore
        self._is_changed = False
        self.all.append(self)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Keep the setting changed while the block runs."""
        block = Block()
        try:
            with self._lock:
                if not self._is_changed:
                    self.original = self._get()
                    self._is_changed = True
                self._blocks.add(block)
                self._set(self._value)
            yield
        finally:
            with self._lock:
                self._blocks.discard(block)
                self.restore_if_unused()

    def restore_if_unused(self) -> None:
        """Restore the setting, unless a block that needs it changed still runs."""
        with self._lock:
            if self._is_changed and not self._blocks:
                self._set(self.original)
                self._is_changed = False


def clear_leftovers(modules: Iterable[nn.Module]) -> None:
    """Remove what an interrupt on entering or leaving a block has left: hooks on these modules, and
    changed settings of the process."""
    for module in modules:
        remove_hooks(module, _is_leftover)
    for setting in SharedSetting.all:
        setting.restore_if_unused()


def _is_leftover(hook: Any) -> bool:
    return isinstance(hook, _Hook) and hook.block() is None


_stance = SharedSetting(compiler_stance, set_compiler_stance, "force_eager")


def uncompiled() -> AbstractContextManager[None]:
    """Run everything uncompiled while a block runs."""
    return _stance.changed()


_fast_path = SharedSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)


@contextmanager
def ordinary_path(model: nn.Module) -> Iterator[None]:
    """Keep torch's own layers out of their private fast paths, where no call can be captured."""
    fast = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer
    if not any(isinstance(module, fast) for module in model.modules()):
        yield
        return
    with _fast_path.changed():
        yield
