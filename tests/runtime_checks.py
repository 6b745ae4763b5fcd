"""Runtime checks of types and shapes that leave out what a function has no need of.

jaxtyping's import hook decorates all of the package with `jaxtyping.jaxtyped`, which binds the
arguments of every call and checks them twice, at several times the cost of one check. Functions
are checked by the type checker alone, those with axes where the sizes of axes are kept, but for
generators and where an annotation is a string: jaxtyping leaves out names that are imported for
static checks only. A check is made at the first call: to make those of all 3,300 functions takes
ten seconds, and a worker calls a part of them. Each test checks the first calls of a function
alone. Import this module before the package.

In the quick tier only functions with axes are checked, which the static type checker knows nothing
of: to make the other checks takes a twentieth of its time. The long tier makes all of them.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, ForwardRef, get_args

import jaxtyping
import torch
from jaxtyping import AbstractArray, config

_jaxtyped = jaxtyping.jaxtyped


def lean_check(item: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Like `jaxtyped`, with its own checks only where annotations need them."""
    if item is None:
        return functools.partial(lean_check, typechecker=typechecker)
    if inspect.isfunction(item):
        has_axes = _has(item.__annotations__.values(), _is_string, _is_array)
        return _at_first_calls(item, _check_of(item, typechecker), has_axes)
    if inspect.isclass(item) and is_dataclass(item):
        if _has((field.type for field in fields(item)), _is_string, _is_array):
            return _jaxtyped(item, typechecker=typechecker)
        if "__init__" in vars(item):
            checked = _at_first_calls(item.__init__, typechecker, has_axes=False)
            item.__init__ = checked  # type: ignore[misc]
        return item
    return _jaxtyped(item, typechecker=typechecker)


Check = Callable[[Callable[..., Any]], Callable[..., Any]]


def _check_of(function: Callable[..., Any], typechecker: Check) -> Check:
    annotations = function.__annotations__.values()
    # The arguments of a generator would be checked at its first step, where others' axes are kept.
    if _has(annotations, _is_string) or inspect.isgeneratorfunction(function):
        return lambda function: _jaxtyped(function, typechecker=typechecker)
    return _with_axes(typechecker) if _has(annotations, _is_array) else typechecker


def _with_axes(typechecker: Check) -> Check:
    def check(function: Callable[..., Any]) -> Callable[..., Any]:
        checked = typechecker(function)

        def call(*args: Any, **options: Any) -> Any:
            with _jaxtyped("context"):
                return checked(*args, **options)

        return call

    return check


def _at_first_calls(
    function: Callable[..., Any], check: Check, has_axes: bool
) -> Callable[..., Any]:
    checked: list[Callable[..., Any]] = []
    n_calls, test = 0, -1  # of that test

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal n_calls, test
        if torch.compiler.is_compiling() or config.jaxtyping_disable:
            return function(*args, **options)
        if not (has_axes or _ALL[0]):
            return function(*args, **options)
        if test != _TESTS[0]:
            n_calls, test = 0, _TESTS[0]
        if n_calls >= _MOST:
            return function(*args, **options)
        n_calls += 1
        if not checked:
            checked.append(check(function))
        return checked[0](*args, **options)

    return call


_MOST = 8  # with all calls checked, tests of watching take half as long again
_TESTS = [0]  # how many have begun
_ALL = [True]  # whether functions without axes are checked


def check_again() -> None:
    """Check the next calls of each function: a test begins."""
    _TESTS[0] += 1


def check_axes_alone() -> None:
    """Leave functions without axes to the static type checker."""
    _ALL[0] = False


def _has(annotations: Iterable[Any], *kinds: Callable[[Any], bool]) -> bool:
    """Whether one is of a kind, or has such a part."""
    return any(
        any(kind(annotation) for kind in kinds)
        or _has(annotation if isinstance(annotation, list) else get_args(annotation), *kinds)
        for annotation in annotations
    )


def _is_string(annotation: Any) -> bool:
    return isinstance(annotation, str | ForwardRef)


def _is_array(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, AbstractArray)


jaxtyping.jaxtyped = lean_check  # type: ignore[assignment]
