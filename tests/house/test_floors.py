"""The floors: a file imports its own folder and lower floors, and other folders by their door."""

import re
import subprocess
import sys
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path

from house.source import PACKAGE, ROOT, Source, sources

FLOORS = (
    ("errors", "shapes", "_choices", "_display"),
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


@cache
def imports() -> list[tuple[Source, str, str]]:
    """Who imports, how that is said, and what is imported."""
    return [
        (source, f"{source}:{line} imports {name}", name)
        for source in SOURCES
        for line, name in source.imports()
    ]


def test_every_part_has_a_floor() -> None:
    assert {source.part for source in SOURCES} <= FLOOR.keys()


def test_imports_point_to_lower_floors() -> None:
    assert [
        said
        for source, said, name in imports()
        if (part := _part(name)) not in (None, source.part) and FLOOR[part] >= FLOOR[source.part]
    ] == []


def test_private_files_are_imported_by_their_own_folder_only() -> None:
    assert [
        said
        for source, said, name in imports()
        if (owner := _owner(name)) is not None and PACKAGE / owner not in source.path.parents
    ] == []


def test_files_that_others_import_by_themselves_are_named_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files = [source.path.relative_to(PACKAGE) for source in SOURCES]
    public = [path for path in files if len(path.parts) > 1 and not path.name.startswith("_")]
    assert [str(path) for path in public if f"`{path}`" not in page] == []


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


def test_the_private_files_of_a_kernel_stay_private() -> None:
    """A folder inside `kernels` is entered by its door, from the other kernels too."""
    inside = re.compile(r"headwise\.kernels\.(\w+)\.(?:\w+\.)*_")
    assert [
        said
        for source, said, name in imports()
        if source.part == "kernels" and (found := inside.match(name))
        if found[1] != source.path.parent.name
    ] == []


# How torch's private interface is written down, wherever it is reached from.
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._(?!_)|\b_C\._|\b_(?:push|pop)_mode\b|\baten\._|\._version\b|_dynamo"
    r"|\b_current_level\b|_is_amx|DisableTorchFunction"
    r"|(?<!self)\._modules\b|\._forward_pre_hooks|_orig_mod|_compiled_call_impl|_qkv_same_embed_dim"
)


def test_torchs_private_interface_is_used_in_one_folder() -> None:
    assert [
        f"{source}:{number}: {line.strip()}"
        for source in SOURCES
        if source.part != "_torch_private"
        for number, line in enumerate(source.path.read_text("utf-8").splitlines(), 1)
        if PRIVATE.search(line)
    ] == []


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


def test_imports_name_the_package_and_annotations_stay_objects() -> None:
    # With annotations as strings the shapes in signatures would not be checked.
    assert [said for _, said, name in imports() if name.startswith((".", "__future__"))] == []


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
        for source, _, name in imports()
        if name.split(".")[0] == "transformers"
    }
    assert knowing == TRANSFORMERS


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
