"""Words: what no tracked file holds, and names and phrases replaced by standard terms.

`docs/glossary.md` has the glossary: one standard term for each idea.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from house.source import PACKAGE, ROOT, sources, tracked_texts


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Written in parts, so that this file does not hold what it looks for.
FORBIDDEN = (
    r"(?<![\w.])/(?:wo" + r"rk|t" + r"mp|ro" + r"ot|ho" + r"me)/",  # a place on one machine
    r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    r"#\s*type:\s*ig" + r"nore(?!\[)",  # without its code it hides too much
    r"#\s*no" + r"qa(?!:)",
    r"^(?:<{7}|>{7}) ",  # a conflict left over
)

# Parts of names that have a standard term: capture, ownership, scoring, progress, rotation, ...
OLD_PARTS = _set("""
    ask asked asks freedom gauge hear heard hearing hears laid lay leaving ledger listen looks
    matter mine owning rival tell tells told turn turned turns unheard wanted
""")
OLD_NAMES = _set("held_still on_batch on_pass on_step on_text read_given tell_torch_layer")
OLD_FILES = _set("""
    _collect _describe _fewer _frame _guard _kept _leaving _look _moments _places _replay _seen
    _shares _shown _slopes _still _words smaller
""")
OLD_NAMES_OF_NATIVE_SOURCE = re.compile(
    r"\b(?:Brain|Desk|Memory|Room|WholeHead|besides|bend|give|in_strip|look|mine|mix|theirs|wild)\b"
)

# Names that say nothing about the value they hold.
GENERIC = _set("""
    asked at both found given heard here how left made mine one other own rest seen some told
    wanted what
""")
MOST_GENERIC = {"src": 0.01, "tests": 0.015, "benchmarks": 0.015}  # of all bound names

# The reference and the layer are the same thing, by definition and for use.
SHARED_CLASSES = {"MultiHeadAttention"}

# Personified tensors and riddles; a space stands for any gap, line breaks included.
OLD_PHRASES = (
    "whoever", "hears?", "(?:un)?heard", "(?:is|are|be|been) told", "told from", "by nobody but",
    "nothing was chosen on", "no knowledge would", "was there to build", "a text a paragraph",
    "shall have", "whose each", "of numbers nothing", "numbers? that (?:is|are) none",
    "(?:gives?|leave behind)(?: [a-z]+){0,3} in the mean", "anew so often", "what was understood",
    "what is asked for", "writes? the softmax out", "a little of all", "judged is",
    "even attention",
)  # fmt: skip
OLD_PHRASE = re.compile(
    rf"\b(?:{'|'.join(OLD_PHRASES)})\b".replace(" ", r"\s+(?:[#/]+\s+)?"), re.IGNORECASE
)
PROSE = ("src", "docs", "benchmarks", "tests", "examples", "Makefile", "pyproject.toml", ".ci")


def test_no_tracked_file_holds_a_forbidden_word() -> None:
    lines = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if any(re.search(pattern, line) for pattern in FORBIDDEN)
    ]
    assert not lines, "\n".join(lines)


def test_files_and_folders_have_standard_names() -> None:
    stems = {
        path.relative_to(PACKAGE): part.removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        for part in path.relative_to(PACKAGE).parts
        if part.removesuffix(".py") in OLD_FILES or not OLD_PARTS.isdisjoint(_parts(part))
    }
    assert not stems, "\n".join(f"{path}: {part}" for path, part in stems.items())


def test_classes_functions_and_arguments_have_standard_names() -> None:
    old = [
        f"{source}:{line}: {name}"
        for source in sources()
        for line, name in _declared(source.tree)
        if name.strip("_") in OLD_NAMES or not OLD_PARTS.isdisjoint(_parts(name))
    ]
    assert not old, "\n".join(old)


@pytest.mark.parametrize("folder", MOST_GENERIC)
def test_no_class_name_stands_for_two_things(folder: str) -> None:
    classes = [
        node.name
        for tree in _trees(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    twice = {name: count for name, count in Counter(classes).items() if count > 1}
    assert twice.keys() <= SHARED_CLASSES, twice


@pytest.mark.parametrize("folder", MOST_GENERIC)
def test_few_names_are_generic(folder: str) -> None:
    names = Counter(name for tree in _trees(folder) for name in _bound(tree))
    generic = {name: names[name] for name in GENERIC if names[name]}
    share = sum(generic.values()) / names.total()
    assert share <= MOST_GENERIC[folder], f"{share:.1%}: {generic}"


def test_progress_has_one_alias() -> None:
    callback = re.compile(r"Callable\[\[int, int\], None\]")
    files = {str(source) for source in sources() if callback.search(source.path.read_text("utf-8"))}
    assert files == {"_progress.py"}


def test_native_source_has_standard_names() -> None:
    old = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in sorted((PACKAGE / "kernels" / "native" / "source").rglob("*.*"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if OLD_NAMES_OF_NATIVE_SOURCE.search(line.partition("//")[0])
    ]
    assert not old, "\n".join(old)


def test_prose_has_no_phrase_of_the_old_dialect() -> None:
    this_file = Path(__file__).relative_to(ROOT)
    old = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"
        for path, text in tracked_texts().items()
        if (path.parts[0] in PROSE or path.suffix == ".md") and path != this_file
        for match in OLD_PHRASE.finditer(text)
    ]
    assert not old, "\n".join(old)


def test_names_of_tests_have_no_phrase_of_the_old_dialect() -> None:
    old = [
        name
        for tree in _trees("tests")
        for _, name in _declared(tree)
        if name.startswith("test_") and OLD_PHRASE.search(name.replace("_", " "))
    ]
    assert not old, "\n".join(old)


@cache
def _trees(folder: str) -> list[ast.Module]:
    """The syntax trees of all Python files of a folder of the repository."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [ast.parse(path.read_text("utf-8"), str(path)) for path in paths]


def _parts(name: str) -> list[str]:
    """The words of a name in snake case or camel case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _declared(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names of classes, functions and arguments, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names of parameters and of assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
