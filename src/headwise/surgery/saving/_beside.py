"""The files beside the weights of a model that are true of a pruned model too."""

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headwise.errors import InputError

# Files beside the weights that heads do not change. Whatever is not named here is left behind:
# weights in other formats are those of the unpruned model, README files hold its figures.
_NAMES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json",
    "merges.txt", "vocab.bpe", "bpe.codes", "dict.txt", "*.model", "*.spm", "*.tiktoken",
    "chat_template.*", "*processor_config.json",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
    "data_config.json", "LICENSE*", "LICENCE*", "NOTICE*",
)  # fmt: skip
_MODULES = "modules.json"
# What a module of sentence-transformers reads from its own folder.
_OF_MODULE = (".json", ".txt", ".model", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_KNOWN = "sentence_transformers."


def files_beside(source: str | Path) -> dict[str, Path]:
    """The files of a model's folder that are kept when heads are removed, by relative name.

    Raises:
        InputError: a link leads out of the folder, or `modules.json` cannot be read, names a
            folder elsewhere, a module with code of its own or one with pickled weights.
    """
    folder = folder_of(source)
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    found = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name, name) for name in _NAMES)
    }
    for module in _modules(folder) if _MODULES in found else ():
        for path in _of_module(module):
            found[path.relative_to(folder).as_posix()] = path
    for name, path in found.items():
        if not path.resolve().is_relative_to(root.resolve()):
            raise InputError(
                f"save: {name} in {folder} is a link that leads out of the folder, to "
                f"{path.resolve()}. Put the file itself there."
            )
    return found


def copy_beside(source: str | Path, folder: Path) -> None:
    """Copy what `files_beside` names into a folder."""
    for name, path in files_beside(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def folder_of(source: str | Path) -> Path:
    """A local folder, or the one in which the hub's client keeps a model."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    import huggingface_hub as hub

    allowed = [*_NAMES, "config.json", *(f"[0-9]*_*/*{ending}" for ending in _OF_MODULE)]
    try:
        return Path(hub.snapshot_download(str(source), allow_patterns=allowed))
    except Exception as error:  # of whichever HTTP library it uses
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"save: source={str(source)!r} is neither a folder nor a hub model in reach ({line}). "
            f"Give the folder or the hub name that the model was loaded from."
        ) from error


def _modules(folder: Path) -> Iterator[Path]:
    """The folders of the modules of a SentenceTransformer, beside that of its transformer."""
    path = folder / _MODULES
    try:
        content: Any = json.loads(path.read_text("utf-8"))
        modules = [(str(module["path"]), str(module["type"])) for module in content]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"save: {path} is no list of modules of a SentenceTransformer ({error}). Save the "
            f"model again with sentence-transformers, or remove the file."
        ) from error
    for name, kind in modules:
        place = folder / name
        if not kind.startswith(_KNOWN):
            raise InputError(
                f"save: {path} asks for the module {kind!r}, whose code is its own, and no code is "
                f"copied. Prune the SentenceTransformer object itself."
            )
        if not place.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"save: {path} names the folder {name!r}, which lies elsewhere. Put it inside."
            )
        if place != folder and place.is_dir():  # a module without settings may have none
            yield place


def _of_module(place: Path) -> list[Path]:
    files = sorted(path for path in place.rglob("*") if path.is_file())
    kept = [path for path in files if path.suffix in _OF_MODULE]
    weights = {path.parent for path in kept if path.suffix == ".safetensors"}
    for path in files:
        if path.suffix in _PICKLES and path.parent not in weights:
            raise InputError(
                f"save: {path} is a pickle, which can run code and is not copied. Convert it to "
                f"safetensors."
            )
    return kept
