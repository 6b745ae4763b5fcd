"""The floors: a file imports its own folder and lower floors, and other folders by their door."""

import pytest

from house.source import Source, sources

FLOORS = (
    ("errors", "shapes", "_native", "_interrupts", "_display", "_progress", "_count_names"),
    ("files", "_tensors", "_size_limits", "_evaluation"),
    ("reference", "masks", "tables", "corpora"),
    ("kernels", "example"),
    ("layer", "counts"),
    ("lab",),
    ("models",),
    ("watch", "scoring"),
    ("roles", "surgery", "monitor"),
    ("report", "recovery"),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
# A file and the one it was split from, or shares, count as one.
SAME = {("table", "_tablefile"), ("scores", "_tablefile")}

each_source = pytest.mark.parametrize("source", sources(), ids=str)


@each_source
def test_every_part_has_a_floor(source: Source) -> None:
    assert source.part in FLOOR, f"say in FLOORS where {source.part} belongs"


@each_source
def test_imports_point_down(source: Source) -> None:
    for line, name in source.imports():
        part = _part(name)
        if part is None or part == source.part or (source.part, part) in SAME:
            continue
        here, there = FLOOR[source.part], FLOOR[part]
        assert there < here, f"{source}:{line} imports {name}: floor {there} from floor {here}"


@each_source
def test_a_folder_is_entered_by_its_door(source: Source) -> None:
    for line, name in source.imports():
        private = any(word.startswith("_") for word in name.split(".")[2:])
        assert not private or _part(name) == source.part, f"{source}:{line} imports {name}"


@each_source
def test_imports_name_the_package(source: Source) -> None:
    for line, name in source.imports():
        assert not name.startswith("."), f"{source}:{line} imports {name}: write headwise…"


@each_source
def test_only_models_knows_transformers(source: Source) -> None:
    if source.part != "models":
        names = [name.split(".")[0] for _, name in source.imports()]
        assert "transformers" not in names, f"{source} imports transformers"


@each_source
def test_annotations_stay_objects(source: Source) -> None:
    # With annotations as strings the shapes in signatures would not be checked.
    assert "__future__" not in [name for _, name in source.imports()]


def _part(name: str) -> str | None:
    """The part of the package that an import leads to; None leads out of it."""
    head, *rest = name.split(".")
    if head != "headwise":
        return None
    # `from headwise import __version__` and the like lead to the front door.
    return rest[0] if rest and rest[0] in FLOOR else "__init__"
