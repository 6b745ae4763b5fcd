"""Earlier names and places of arguments, which work with a warning for one version."""

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(earlier: str, now: str) -> None:
    """Warn the caller of a public function or attribute that its name is an earlier one."""
    message = f"{earlier} is called {now} now. The earlier way works in this version alone."
    warnings.warn(message, FutureWarning, stacklevel=3)


def renamed(
    *, tokenizer: int | None = None, **earlier: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function take earlier names of its arguments, and a tokenizer that has no name.

    Args:
        tokenizer: The place at which the tokenizer stood, where it is a keyword now.
        earlier: The earlier name of an argument, by its name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(function).parameters
        places = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        needed = tokenizer is not None and parameters["tokenizer"].default is Parameter.empty

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            for name, before in earlier.items():
                if before in kwargs and name not in kwargs:
                    warn_renamed(f"{function.__name__}: {before}=", f"{name}=")
                    kwargs[name] = kwargs.pop(before)
            if tokenizer is not None and tokenizer < len(args) and "tokenizer" not in kwargs:
                # One argument more than there are places: the tokenizer is among them.
                twice = set(places[: len(args)]) & kwargs.keys()
                if needed or twice or len(args) > len(places):
                    warn_renamed(f"{function.__name__}: argument {tokenizer + 1}", "tokenizer=")
                    kwargs["tokenizer"] = args[tokenizer]
                    args = args[:tokenizer] + args[tokenizer + 1 :]
            return function(*args, **kwargs)

        return call

    return decorate
