"""Runtime checks of types and shapes that leave out what a function has no need of.

jaxtyping's import hook decorates all of the package with `jaxtyping.jaxtyped`, which binds the
arguments of every call to keep the sizes of its axes, at several times the cost of the check.
Only annotations with axes need that; other functions are checked by the type checker alone.
Import this module before the package.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import jaxtyping
from jaxtyping import AbstractArray, config

_jaxtyped = jaxtyping.jaxtyped


def lean_check(item: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Like `jaxtyped`, which checks only what has axes in its annotations."""
    if item is None:
        return functools.partial(lean_check, typechecker=typechecker)
    if inspect.isfunction(item) and not _has_axes(item.__annotations__.values()):
        return _typed(item, typechecker)
    if inspect.isclass(item) and is_dataclass(item):
        if _has_axes(field.type for field in fields(item)):
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


def _has_axes(annotations: Any) -> bool:
    return any(_is_of_arrays(annotation) for annotation in annotations)


def _is_of_arrays(annotation: Any) -> bool:
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    if isinstance(annotation, str):
        return "Tensor" in annotation
    return "jaxtyping" in repr(annotation)


jaxtyping.jaxtyped = lean_check  # type: ignore[assignment]
