"""Runtime checks of types and shapes that leave out what a function has no need of.

jaxtyping's import hook decorates all of the package with `jaxtyping.jaxtyped`, which binds the
arguments of every call to keep the sizes of its axes, at several times the cost of the check.
Only annotations with axes need that; other functions are checked by the type checker alone, unless
an annotation is a string: jaxtyping leaves out names that are imported for static checks only.
A check is made at the first call: to make those of all 3,300 functions takes ten seconds, and a
worker calls a part of them. Each test checks the first calls of a function alone. Import this
module before the package.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, ForwardRef, get_args
from weakref import WeakKeyDictionary

import jaxtyping
import torch
from jaxtyping import AbstractArray, config

_jaxtyped = jaxtyping.jaxtyped


def lean_check(item: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Like `jaxtyped`, with its own checks only where annotations need them."""
    if item is None:
        return functools.partial(lean_check, typechecker=typechecker)
    if inspect.isfunction(item):
        needs_all = _needs_all(item.__annotations__.values())
        return _at_first_calls(item, _with_axes(typechecker) if needs_all else typechecker)
    if inspect.isclass(item) and is_dataclass(item):
        if _needs_all(field.type for field in fields(item)):
            return _jaxtyped(item, typechecker=typechecker)
        if "__init__" in vars(item):
            item.__init__ = _at_first_calls(item.__init__, typechecker)  # type: ignore[misc]
        return item
    return _jaxtyped(item, typechecker=typechecker)


Check = Callable[[Callable[..., Any]], Callable[..., Any]]


def _with_axes(typechecker: Check) -> Check:
    return lambda function: _jaxtyped(function, typechecker=typechecker)


def _at_first_calls(function: Callable[..., Any], check: Check) -> Callable[..., Any]:
    checked: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or config.jaxtyping_disable:
            return function(*args, **options)
        n = _CALLS.get(call, 0)
        if n >= _MOST:
            return function(*args, **options)
        _CALLS[call] = n + 1
        if not checked:
            checked.append(check(function))
        return checked[0](*args, **options)

    return call


_MOST = 8  # with all calls checked, tests of watching take half as long again
# How many calls of a function the test has checked. Functions within functions hold variables.
_CALLS: WeakKeyDictionary[Callable[..., Any], int] = WeakKeyDictionary()


def check_again() -> None:
    """Check the next calls of each function: a test begins."""
    _CALLS.clear()


def _needs_all(annotations: Iterable[Any]) -> bool:
    """Whether one is of arrays or a string, or has such a part."""
    return any(
        isinstance(annotation, str | ForwardRef)
        or (inspect.isclass(annotation) and issubclass(annotation, AbstractArray))
        or _needs_all(annotation if isinstance(annotation, list) else get_args(annotation))
        for annotation in annotations
    )


jaxtyping.jaxtyped = lean_check  # type: ignore[assignment]
