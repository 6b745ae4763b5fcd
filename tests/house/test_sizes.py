"""Size budgets: what exceeds them is reported, what exceeds them by far fails."""

import ast
from collections.abc import Iterator

import pytest

from house.source import Source, sources

BUDGET = {"function": 40, "file": 300, "arguments": 7, "nesting": 3}
LIMIT = {"function": 45, "file": 320}
_DEEPER = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def test_no_size_is_far_over_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [size for source in sources() for size in _sizes(source)]
    over = [f"{where}: {size}" for kind, size, where in sizes if size > BUDGET[kind]]
    far = [f"{where}: {size}" for kind, size, where in sizes if size > LIMIT.get(kind, size)]
    with capsys.disabled():
        print("".join(f"\nover budget: {line}" for line in over))
    assert not far


def _sizes(source: Source) -> Iterator[tuple[str, int, str]]:
    """Kind, size and place of everything in a file that has a budget."""
    yield "file", source.lines, f"{source} lines"
    for function in source.functions():
        where = f"{source}:{function.lineno} {function.name}"
        yield "function", _length(function), f"{where} lines"
        yield "arguments", _arguments(function), f"{where} arguments"
        yield "nesting", _nesting(function), f"{where} nesting"


def _length(function: ast.FunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def _arguments(function: ast.FunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def _nesting(node: ast.AST) -> int:
    """The depth of nested blocks; an `elif` is as deep as its `if`."""
    inner = (
        _nesting(child) - (isinstance(node, ast.If) and node.orelse == [child])
        for child in ast.iter_child_nodes(node)
        if not isinstance(child, ast.FunctionDef | ast.ClassDef)
    )
    return max(inner, default=0) + isinstance(node, _DEEPER)
