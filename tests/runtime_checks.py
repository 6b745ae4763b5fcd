"""Runtime checks of types and shapes that leave out what a function has no need of.

jaxtyping's import hook decorates all of the package with `jaxtyping.jaxtyped`, which binds the
arguments of every call to keep the sizes of its axes, at several times the cost of the check.
Only annotations with axes need that; other functions are checked by the type checker alone, unless
an annotation is a string: jaxtyping leaves out names that are imported for static checks only.
Import this module before the package.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, ForwardRef, get_args

import jaxtyping
from jaxtyping import AbstractArray, config

_jaxtyped = jaxtyping.jaxtyped


def lean_check(item: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Like `jaxtyped`, with its own checks only where annotations need them."""
    if item is None:
        return functools.partial(lean_check, typechecker=typechecker)
    if inspect.isfunction(item) and not _needs_all(item.__annotations__.values()):
        return _typed(item, typechecker)
    if inspect.isclass(item) and is_dataclass(item):
        if _needs_all(field.type for field in fields(item)):
            return _jaxtyped(item, typechecker=typechecker)
        if "__init__" in vars(item):
            item.__init__ = _typed(item.__init__, typechecker)  # type: ignore[misc]
        return item
    return _jaxtyped(item, typechecker=typechecker)


def _typed(function: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    checked = typechecker(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return (function if config.jaxtyping_disable else checked)(*args, **options)

    return call


def _needs_all(annotations: Iterable[Any]) -> bool:
    """Whether one is of arrays or a string, or has such a part."""
    return any(
        isinstance(annotation, str | ForwardRef)
        or (inspect.isclass(annotation) and issubclass(annotation, AbstractArray))
        or _needs_all(annotation if isinstance(annotation, list) else get_args(annotation))
        for annotation in annotations
    )


jaxtyping.jaxtyped = lean_check  # type: ignore[assignment]
