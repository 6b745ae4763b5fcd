"""The files beside the weights of a model that stay valid when heads are removed."""

import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from headwise._display import first_line
from headwise._extras import require
from headwise.checkpoints._gguf_load import find_gguf
from headwise.errors import InputError
from headwise.files import build_from, read_json

TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json",
    "merges.txt", "vocab.bpe", "bpe.codes", "dict.txt", "*.model", "*.spm", "*.tiktoken",
)  # fmt: skip
# Files that do not depend on the heads. No other file is copied: weights in other formats are those
# of the unpruned model, README files report its results.
_NAMES = (
    *TOKENIZER_FILES, "chat_template.*", "*processor_config.json",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
    "data_config.json", "LICENSE*", "LICENCE*", "NOTICE*",
)  # fmt: skip
_MODULES = "modules.json"
# The files that a module of sentence-transformers reads from its own folder.
_MODULE_SUFFIXES = (".json", ".txt", ".model", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_KNOWN = "sentence_transformers."


def source_files(source: str | Path) -> dict[str, Path]:
    """The files of a model's folder to copy beside a pruned model, by relative path.

    What lies beside a GGUF file may belong to another model: it holds all of its own.
    """
    if find_gguf(source, "save"):
        return {}
    folder = source_folder(source)
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name, name) for name in _NAMES)
    }
    for module in _modules(folder) if _MODULES in files else ():
        for path in _module_files(module):
            files[path.relative_to(folder).as_posix()] = path
    for name, path in files.items():
        if not path.resolve().is_relative_to(root.resolve()):
            raise InputError(
                f"save: {name} in {folder} is a link that leads out of the folder, to "
                f"{path.resolve()}. Put the file itself there."
            )
    return files


def copy_source_files(source: str | Path, folder: Path) -> None:
    """Copy the files that `source_files` lists into a folder."""
    for name, path in source_files(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def source_folder(source: str | Path) -> Path:
    """A local folder, or the cache folder of a hub model, which is downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    hub = require("huggingface_hub", "hf", "save")
    allowed = [*_NAMES, "config.json", *(f"[0-9]*_*/*{suffix}" for suffix in _MODULE_SUFFIXES)]
    try:
        return Path(hub.snapshot_download(str(source), allow_patterns=allowed))
    except Exception as error:  # the HTTP library decides which one
        raise InputError(
            f"save: source={str(source)!r} is neither a folder nor a reachable hub model "
            f"({first_line(error)}). Give the folder or the hub name that the model was loaded "
            f"from."
        ) from error


def _modules(folder: Path) -> Iterator[Path]:
    """The folders of the modules of a SentenceTransformer other than its transformer."""
    path = folder / _MODULES
    problem = "is not a list of modules of a SentenceTransformer"
    advice = "Save the model again with sentence-transformers, or remove the file."
    content = read_json(path, "save", advice, problem)
    modules = build_from(
        lambda: [
            (str(module["path"]), str(module["type"]), (folder / str(module["path"])).resolve())
            for module in content
        ],
        f"save: {path} {problem}",
        advice,
    )
    for name, kind, location in modules:
        if not kind.startswith(_KNOWN):
            raise InputError(
                f"save: {path} names the module {kind!r}, which has code of its own, and no code "
                f"is copied. Prune the SentenceTransformer object itself."
            )
        if ".." in Path(name).parts or not location.is_relative_to(folder.resolve()):
            raise InputError(
                f"save: {path} names the folder {name!r}, which lies outside. Put it inside."
            )
        # A module without settings may have no folder.
        if location != folder.resolve() and os.path.isdir(location):
            yield folder / name


def _module_files(location: Path) -> list[Path]:
    files = sorted(path for path in location.rglob("*") if path.is_file())
    kept = [path for path in files if path.suffix in _MODULE_SUFFIXES]
    weights = {path.parent for path in kept if path.suffix == ".safetensors"}
    for path in files:
        if path.suffix in _PICKLES and path.parent not in weights:
            raise InputError(
                f"save: {path} is a pickle, which can run code and is not copied. Convert it to "
                f"safetensors."
            )
    return kept
