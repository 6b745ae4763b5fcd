"""Relations of the user's own, from Python files that the user names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise._display import did_you_mean
from headwise.errors import ArgumentError, InputError
from headwise.roles import Pairs, TokenText

Relation = Callable[[TokenText], Pairs]


def load_relations(sources: Sequence[str], model: str) -> dict[str, Relation]:
    """The functions that `FILE.py:NAME` name, by name. Each file is run once.

    Only files that the user names are run, and none in the folder of the model.

    Raises:
        ArgumentError: a source is not FILE.py:NAME, lies in the model's folder, or two have one
            name.
        InputError: the file cannot be read or fails, or has no such function of one argument.
    """
    relations: dict[str, Relation] = {}
    for source in sources:
        file, _, name = source.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ArgumentError(
                f"--relation: {source!r} is not FILE.py:NAME. Name a Python file and a function "
                f"in it."
            )
        if name in relations:
            raise ArgumentError(f"--relation: two functions are called {name}. Rename one.")
        path = Path(file).resolve()
        if Path(model).is_dir() and path.is_relative_to(Path(model).resolve()):
            raise ArgumentError(
                f"--relation: {file} lies in the folder of the model, whose code is never run. "
                f"Give a file of your own."
            )
        relations[name] = _function(path, name)
    return relations


def _function(path: Path, name: str) -> Relation:
    if not path.is_file():
        raise InputError(f"--relation: {path} is not a file. Give FILE.py:NAME.")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:  # an import would leave a folder of compiled modules beside the file
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise InputError(
            f"--relation: {path} fails ({type(error).__name__}: {error}). Correct it."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise InputError(
            f"--relation: {path} has no function {name}.{did_you_mean(name, functions)} It has "
            f"{', '.join(functions) or 'none'}."
        )
    try:
        with suppress(ValueError):  # a built-in function may have no signature
            signature(function).bind(None)
    except TypeError as error:
        raise InputError(
            f"--relation: {name}{signature(function)} in {path} cannot be called with one "
            f"argument, the TokenText ({error}). Write def {name}(text): ..."
        ) from error
    return _with_named_failures(function, path, name)


def _with_named_failures(function: Callable[[TokenText], Any], path: Path, name: str) -> Relation:
    """The function, whose exceptions name it, its file and the text."""

    @wraps(function)
    def relation(text: TokenText) -> Any:
        try:
            result = function(text)
            return list(result) if isinstance(result, Iterator) else result  # runs a generator
        except (Exception, SystemExit) as error:  # whatever the function raises
            raise InputError(
                f"--relation: {name} in {path} fails ({type(error).__name__}: {error}) for the "
                f"text {text.text.text[:40]!r}. Correct it."
            ) from error

    return relation
