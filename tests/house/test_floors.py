"""The floors: a file imports its own folder and lower floors, and other folders by their door."""

import re
import subprocess
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import pytest

from house.source import PACKAGE, Source, sources

FLOORS = (
    ("errors", "shapes", "_choices", "_display", "_renamed"),
    ("_native_library", "_extras", "_progress", "_torch_private"),
    ("files", "_tensors", "_evaluation"),
    ("reference", "masks", "tables", "corpora", "_checkpoint"),
    ("kernels", "example", "counts"),
    ("layer",),
    ("lab",),
    ("models",),
    ("attention",),
    ("cache",),
    ("capture",),
    ("ownership",),
    ("checkpoints",),
    ("watch", "scoring"),
    ("roles", "surgery", "caching", "monitor", "head_effects", "regions"),
    ("report", "recovery", "batches", "vllm"),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
# Code that runs in its own process: a file, and what it imports there.
FRESH = {("headwise.checkpoints._fresh_process", "headwise.checkpoints")}

SOURCES = sources()
PARTS = sorted({source.part for source in SOURCES})


def each_source(check: Callable[[Source], None]) -> Callable[[str], None]:
    """A test for each part of the package, which checks all of its files."""

    def test(part: str) -> None:
        for source in SOURCES:
            if source.part == part:
                check(source)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return pytest.mark.parametrize("part", PARTS)(test)


@each_source
def test_every_part_has_a_floor(source: Source) -> None:
    assert source.part in FLOOR, f"say in FLOORS where {source.part} belongs"


@each_source
def test_imports_point_to_lower_floors(source: Source) -> None:
    for line, name in source.imports():
        part = _part(name)
        if part is None or part == source.part:
            continue
        floor, imported = FLOOR[source.part], FLOOR[part]
        assert imported < floor, (
            f"{source}:{line} imports {name}: floor {imported} from floor {floor}"
        )


@each_source
def test_private_files_are_imported_by_their_own_folder_only(source: Source) -> None:
    for line, name in source.imports():
        owner = _owner(name)
        assert owner is None or PACKAGE / owner in source.path.parents, (
            f"{source}:{line} imports {name}, which is private to {owner or 'the package'}"
        )


def test_the_folder_of_a_private_file_is_found_at_every_level() -> None:
    assert _owner("headwise.kernels.rows._kernel") == Path("kernels/rows")
    assert _owner("headwise._display") == Path()
    assert _owner("headwise.capture") is None
    assert _owner("torch._dynamo") is None


def test_no_imports_go_in_circles() -> None:
    files = {source.module: source for source in sources()}
    imports = {
        module: {_file(name, files) for _, name in source.imports()} - {module, None}
        for module, source in files.items()
    }
    for module, name in FRESH:
        imports[module].discard(name)
    circles = [module for module in imports if module in _reachable(module, imports)]
    assert not circles


def _file(name: str, files: Container[str]) -> str | None:
    """The file of the package that an import leads to; None for the front door, which is lazy."""
    for module in (name, name.rpartition(".")[0]):
        if module in files and module != "headwise":
            return module
    return None


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """The nodes that one or more edges lead to."""
    reached: set[str] = set()
    queue = [start]
    while queue:
        new = graph[queue.pop()] - reached
        reached |= new
        queue += new
    return reached


@each_source
def test_the_private_files_of_a_kernel_stay_private(source: Source) -> None:
    """A folder inside `kernels` is entered by its door, from the other kernels too."""
    folder = source.path.parent.name
    for line, name in source.imports():
        parts = name.split(".")
        if source.part == "kernels" and parts[:2] == ["headwise", "kernels"] and len(parts) > 3:
            private = any(word.startswith("_") for word in parts[3:])
            assert not private or parts[2] == folder, f"{source}:{line} imports {name}"


# How torch's private interface is written down, wherever it is reached from.
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._(?!_)|\b_C\._|\b_(?:push|pop)_mode\b|\baten\._|\._version\b|_dynamo"
    r"|\b_current_level\b|_is_amx|DisableTorchFunction"
    r"|(?<!self)\._modules\b|\._forward_pre_hooks|_orig_mod|_compiled_call_impl|_qkv_same_embed_dim"
)


@each_source
def test_torchs_private_interface_is_used_in_one_folder(source: Source) -> None:
    if source.part == "_torch_private":
        return
    lines = enumerate(source.path.read_text("utf-8").splitlines(), 1)
    used = [f"{source}:{number}: {line.strip()}" for number, line in lines if PRIVATE.search(line)]
    assert not used, "\n".join(used)


def test_importing_torchs_private_interface_needs_none_of_it() -> None:
    """A missing private name of torch raises when it is used, not on import."""
    code = (
        "import sys, torch; sys.modules['torch._subclasses.fake_tensor'] = None\n"
        "del torch.cpu._is_amx_tile_supported\n"
        "from headwise import _torch_private as private\n"
        "print(private.cpu_multiplies_bfloat16_tiles(), private.can_read(torch.ones(1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True\n", "")


@each_source
def test_imports_name_the_package(source: Source) -> None:
    for line, name in source.imports():
        assert not name.startswith("."), f"{source}:{line} imports {name}: write headwise…"


# The files that may import transformers, and do so when a model of its classes needs it.
TRANSFORMERS = {
    "attention/_register.py",
    "attention/huggingface/_transformers.py",
    "cache/huggingface.py",
    "checkpoints/_folder_checks.py",
    "checkpoints/_formats.py",
    "checkpoints/_fresh_process.py",
    "checkpoints/_gguf_load.py",
    "checkpoints/_load.py",
    "models/_transformers_private.py",
    "models/interface.py",
}


def test_few_files_know_transformers() -> None:
    knowing = {
        source.path.relative_to(PACKAGE).as_posix()
        for source in SOURCES
        for _, name in source.imports()
        if name.split(".")[0] == "transformers"
    }
    assert knowing == TRANSFORMERS


@each_source
def test_annotations_stay_objects(source: Source) -> None:
    # With annotations as strings the shapes in signatures would not be checked.
    assert "__future__" not in [name for _, name in source.imports()]


def _owner(name: str) -> Path | None:
    """The folder of the package that a private file or folder stands in; None for a public one."""
    package, *parts = name.split(".")
    private = [depth for depth, part in enumerate(parts) if part.startswith("_")]
    return Path(*parts[: private[0]]) if package == "headwise" and private else None


def _part(name: str) -> str | None:
    """The part of the package that an import leads to; None leads out of it."""
    head, *parts = name.split(".")
    if head != "headwise":
        return None
    # `from headwise import __version__` and the like lead to the front door.
    return parts[0] if parts and parts[0] in FLOOR else "__init__"
