"""The files, syntax trees and imports of the package, for the house rules."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwise"


@dataclass(frozen=True)
class Source:
    """A file of the package."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(PACKAGE))

    @property
    def part(self) -> str:
        """The folder the file is in, or its own name where it stands in none."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(part for part in parts if part != "__init__")

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Each module, and private name of a module, that is imported, with its line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names = {_module_or_name(module, alias.name) for alias in node.names}
                yield from ((node.lineno, name) for name in sorted(names))


def sources() -> list[Source]:
    """Every file of the package."""
    return [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


def _module_or_name(module: str, name: str) -> str:
    """What `from module import name` leads to: a file of the package, or else the module.

    Of the package itself, and of what is private, the name is kept.
    """
    full = f"{module}.{name}"
    file = PACKAGE.parent.joinpath(*full.split("."))
    named = module == "headwise" or (name.startswith("_") and module.startswith("headwise."))
    return full if named or file.with_suffix(".py").exists() or file.is_dir() else module


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))
