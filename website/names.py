"""The reference of names: one page for each topic, rendered from docstrings by mkdocstrings."""

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import headwise


@dataclass(frozen=True)
class Topic:
    """A page of the reference.

    Attributes:
        title: Its heading.
        homes: The parts of the package whose public names it explains.
        more: Names and modules below `headwise` that the documentation imports.
    """

    title: str
    homes: tuple[str, ...]
    more: tuple[str, ...] = ()


TOPICS = {
    "attention.md": Topic("Attention and the layer", ("kernels", "layer"), ("layer.ALiBi",)),
    "masks.md": Topic("Masks", ("masks",)),
    "definition.md": Topic("The definition", ("reference",), ("example",)),
    "models.md": Topic(
        "Models and files", ("models", "attention", "cache", "capture", "checkpoints", "ownership")
    ),
    "observe.md": Topic("Observe", ("watch", "tables", "regions"), ("regions.ImageRegions",)),
    "training.md": Topic(
        "Train and monitor", ("monitor",), ("monitor.Above", "monitor.Below", "lab")
    ),
    "importance.md": Topic("Importance", ("scoring",), ("scoring.Gates", "scoring.paired")),
    "pruning.md": Topic("Prune and recover", ("surgery", "recovery")),
    "caches.md": Topic(
        "Smaller caches", ("caching",), ("caching.compare_caches", "caching.retrieval_batches")
    ),
    "roles.md": Topic(
        "Roles and behaviors",
        ("roles", "head_effects"),
        (
            "roles.AlignedBatch",
            "roles.agreement",
            "roles.behavior",
            "roles.name_moving",
            "roles.induction",
            "roles.task_examples",
            "roles.translation",
            "roles.Behavior",
            "roles.BehaviorBatch",
            "roles.Effects",
            "roles.ChoiceRelation",
            "roles.TokenText",
            "roles.relations.tokenize",
        ),
    ),
    "texts.md": Topic("Texts and annotations", ("corpora",), ("corpora",)),
    "report.md": Topic("Studies and pages", ("report", "_progress"), ("report.Comparison",)),
    "batches.md": Topic("Large corpora", ("batches",), ("batches.BatchImportance",)),
    "counts.md": Topic("Counts", (), ("counts",)),
    "errors.md": Topic("Errors", ("errors",)),
}
MEMBERS = (property, classmethod, staticmethod)  # of a class, besides its methods
REST = "more.md"  # names of parts that no topic lists yet


def names_pages() -> dict[str, str]:
    """The text of each page of the reference, by its file.

    Raises:
        RuntimeError: a public name, or a public method of one, has no docstring.
    """
    entries = _entries()
    missing = [lack for names in entries.values() for name in names for lack in _lacking(name)]
    if missing:
        raise RuntimeError(f"Public names without a docstring: {', '.join(missing)}.")
    titles = {file: topic.title for file, topic in TOPICS.items()} | {REST: "More"}
    pages = {
        file: "\n\n".join([f"# {titles[file]}", *(f"::: {name}" for name in names)]) + "\n"
        for file, names in entries.items()
    }
    return {"index.md": _index(entries, titles)} | pages


def unexplained(documents: Iterable[Path]) -> list[str]:
    """The names below `headwise` that documents import although the reference lacks them."""
    known = {name for names in _entries().values() for name in names}
    imported = {
        name
        for document in documents
        for code in re.findall(r"^```python\n(.*?)^```", document.read_text("utf-8"), re.M | re.S)
        for name in _imported(code)
    }
    return sorted(
        name
        for name in imported
        if not {name, name.rpartition(".")[0], f"headwise.{name.split('.')[-1]}"} & known
    )


def _entries() -> dict[str, list[str]]:
    """The full names that each page explains; pages without a name are left out."""
    homes = {name: _home(name) for name in headwise.__all__}
    listed = {home for topic in TOPICS.values() for home in topic.homes}
    entries = {
        file: [f"headwise.{name}" for name, home in homes.items() if home in topic.homes]
        + [f"headwise.{name}" for name in topic.more]
        for file, topic in TOPICS.items()
    }
    # A module is explained by its members: HeadwiseError stands on the page of errors once.
    modules = {name for names in entries.values() for name in names if _is_module(name)}
    entries = {
        file: [name for name in names if _parent(name) not in modules]
        for file, names in entries.items()
    }
    entries[REST] = [f"headwise.{name}" for name, home in homes.items() if home not in listed]
    return {file: names for file, names in entries.items() if names}


def _home(name: str) -> str:
    """The part of the package that a name of the front door comes from."""
    value = getattr(headwise, name)
    module = value.__name__ if inspect.ismodule(value) else value.__module__
    return module.split(".")[1]


def _is_module(name: str) -> bool:
    return inspect.ismodule(_value(name))


def _parent(name: str) -> str:
    """The module that a name is defined below: `headwise.corpora` of a reader."""
    value = _value(name)
    module = getattr(value, "__module__", "")
    return ".".join(module.split(".")[:2]) if not inspect.ismodule(value) else ""


def _value(name: str) -> Any:
    path, _, last = name.rpartition(".")
    try:
        return getattr(import_module(path), last)
    except AttributeError:
        return import_module(name)


def _lacking(name: str) -> Iterator[str]:
    """The name itself, its members or methods, as far as they have no docstring."""
    value = _value(name)
    if inspect.ismodule(value):
        for member in getattr(value, "__all__", [one for one in vars(value) if one[0] != "_"]):
            thing = getattr(value, member)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield from _lacking(f"{name}.{member}")
    elif not _documentation(value):
        yield name
    if inspect.isclass(value) and value.__module__.startswith("headwise"):
        for member, thing in vars(value).items():
            is_documented = callable(thing) or isinstance(thing, MEMBERS)
            public = not member.startswith("_") and is_documented
            if public and not (inspect.getdoc(getattr(value, member)) or "").strip():
                yield f"{name}.{member}"


def _documentation(value: Any) -> str:
    """The docstring of a name; of a class its own, neither inherited nor made by `dataclass`."""
    text = (vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)) or ""
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text.strip()


def _imported(code: str) -> Iterator[str]:
    """The full names that a block of code imports from a module below `headwise`."""
    for module, names in re.findall(r"from (headwise\.[\w.]+) import ([\w, ]+)", code):
        yield from (f"{module}.{name.split()[0]}" for name in names.split(","))


def _index(entries: dict[str, list[str]], titles: dict[str, str]) -> str:
    """The page that lists every name with its first sentence."""
    lines = ["# Every public name", "`import headwise as hw`; commands: [Commands](commands.md)."]
    for file, names in entries.items():
        rows = [f"| [`{_short(name)}`]({file}#{name}) | {_summary(name)} |" for name in names]
        table = "\n".join(["| name | what it is |", "| :-- | :-- |", *rows])
        lines += [f"## [{titles[file]}]({file})", table]
    return "\n\n".join(lines) + "\n"


def _short(name: str) -> str:
    return "hw." + name.removeprefix("headwise.")


def _summary(name: str) -> str:
    first = (inspect.getdoc(_value(name)) or "").split("\n\n")[0].replace("\n", " ")
    return first.replace("|", "\\|")
