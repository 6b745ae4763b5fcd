"""Relations of the user's own, from Python files that the user names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise._display import did_you_mean
from headwise.errors import ArgumentError, InputError
from headwise.roles import ChoiceRelation, Relation, TokenText


def load_relations(sources: Sequence[str], model: str) -> dict[str, Relation]:
    """The functions and choices that `FILE.py:NAME` name, by name. Each file is run once.

    Only files that the user names are run, and none in the folder of the model.

    Raises:
        ArgumentError: a source is not FILE.py:NAME, lies in the model's folder, or two have one
            name.
        InputError: the file cannot be read or fails, or has no such function of one argument and
            no such `ChoiceRelation`.
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
        relations[name] = _relation(path, name)
    return relations


def _relation(path: Path, name: str) -> Relation:
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
    relation = getattr(module, name, None)
    if isinstance(relation, ChoiceRelation):
        return replace(
            relation,
            pairs=_checked(relation.pairs, path, f"{name}.pairs"),
            candidates=_checked(relation.candidates, path, f"{name}.candidates"),
        )
    if not callable(relation):
        functions = [key for key, value in vars(module).items() if _is_relation(value)]
        raise InputError(
            f"--relation: {path} has no function {name}.{did_you_mean(name, functions)} It has "
            f"{', '.join(functions) or 'none'}."
        )
    return _checked(relation, path, name)


def _is_relation(value: Any) -> bool:
    """Whether a name of a file may be a relation: a function or a choice, and no class."""
    return isinstance(value, ChoiceRelation) or (callable(value) and not isinstance(value, type))


def _checked(function: Callable[..., Any], path: Path, name: str) -> Callable[[TokenText], Any]:
    """The function, which takes one argument, with failures that name it.

    Raises:
        InputError: it takes more arguments, or none.
    """
    try:
        with suppress(ValueError):  # a built-in function may have no signature
            signature(function).bind(None)
    except TypeError as error:
        raise InputError(
            f"--relation: {name}{signature(function)} in {path} cannot be called with one "
            f"argument, the TokenText ({error}). Write def {name}(text): ..."
        ) from error
    return _with_named_failures(function, path, name)


def _with_named_failures(
    function: Callable[[TokenText], Any], path: Path, name: str
) -> Callable[[TokenText], Any]:
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
