"""Checks of a folder of Hugging Face before transformers opens it.

Only safetensors inside the folder are read, no code is fetched for it, no adapter is applied, and
its configuration describes a model of about the size of its weights.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError

from headwise._size_limits import StoredSize, stored_size
from headwise.errors import InputError

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Where a configuration says which code computes attention, or the experts of a mixture.
_KERNELS = re.compile(r"_?(attn|experts)_implementation")
# Counts of modules, by which lists and modules are made; and counts of rows of a weight.
_LAYERS = re.compile(r"layers?$|depths?$|blocks$|stages$")
_ROWS = re.compile(r"num_labels$|heads?$|experts$|groups$")
# More labels than any configuration has whose head is not in the file.
_SPARE_ROWS = 2**20


def check_folder(folder: Path) -> StoredSize:
    """Refuse an unsafe folder before anything but JSON and headers of weights is read.

    Links in a folder are followed, as in the cache of the hub, whose files are links; what they
    lead to is read as safetensors or JSON all the same. Names in an index are not followed out of
    the folder.

    Returns:
        How much the weight files in the folder hold.
    Raises:
        InputError: there are adapters, weights outside the folder or not in safetensors, kernels
            of the hub, or far more layers than weights.
        SafetensorError: a file of weights is broken.
    """
    check_no_adapter(folder)
    config = read_object(folder / CONFIG)
    check_kernels(config, folder / CONFIG)
    packed = any(key == "quantization_config" for key, _ in _entries(config))
    files = weight_files(folder, config)
    size = stored_size(files, packed)
    for path in {*folder.glob("*.safetensors")} - {*files}:
        with suppress(SafetensorError, OSError):  # a few models read some of these too
            size += stored_size([path], packed)
    _check_counts(config, size, folder / CONFIG)
    return size


def check_no_adapter(folder: Path) -> None:
    """Refuse adapters beside the weights: transformers would apply them without saying so.

    Raises:
        InputError: there are some.
    """
    path = folder / ADAPTER
    if not path.exists():
        return
    about = read_object(path)
    base = about.get("base_model_name_or_path")
    raise InputError(
        f"load: {folder} holds {ADAPTER}, an adapter ({about.get('peft_type')!r}) of {base!r}, "
        f"which load does not apply. Merge it with peft's merge_and_unload and save the result, "
        f"or move it elsewhere to open the weights without it."
    )


def check_kernels(config: dict[str, Any], path: Path) -> None:
    """Refuse a configuration that has attention computed by code of the hub.

    Raises:
        InputError: it names a kernel there, or one that transformers would take from there.
    """
    for key, value in _entries(config):
        if not _KERNELS.fullmatch(key):
            continue
        for name in value.values() if isinstance(value, dict) else [value]:
            if isinstance(name, str) and _is_fetched(name):
                raise InputError(
                    f"load: {path} has {key}={name!r}, a kernel whose code would be fetched from "
                    f"the hub and run. Remove {key} from the file."
                )


def weight_files(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The files that transformers takes the weights from, of those that are there.

    Raises:
        InputError: one is not in the folder, is not a safetensors file, or the index is broken.
    """
    named = named_weights(folder, config)
    first = folder / (named or WEIGHTS)
    if named is None and not first.is_file():
        first = folder / INDEX
    if not first.is_file():
        return []
    if first.name.endswith(".safetensors"):
        return [first]
    return [folder / name for name in names_in_index(first) if (folder / name).is_file()]


def named_weights(folder: Path, config: dict[str, Any]) -> str | None:
    """The file of weights, or index of them, that a configuration names.

    Raises:
        InputError: it is neither, or not in the folder.
    """
    named = config.get("transformers_weights")
    if named is not None:
        check_weights_name(named, folder / CONFIG, (".safetensors", ".safetensors.index.json"))
    return named


def names_in_index(index: Path) -> list[str]:
    """The names of the files in an index of shards.

    Raises:
        InputError: there are none, or one is not in safetensors or leads out of the folder.
    """
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError(f"load: {index} has no weight_map. Copy or save the model again.")
    found = {name if isinstance(name, str) else repr(name) for name in names.values()}
    for name in sorted(found):
        check_weights_name(name, index, (".safetensors",))
    return sorted(found)


def check_weights_name(name: Any, where: Path, endings: tuple[str, ...]) -> None:
    """Refuse the name of a file that is not in safetensors, or not in its folder.

    Raises:
        InputError: it is such a name.
    """
    if not isinstance(name, str) or not name.endswith(endings):
        raise InputError(
            f"load: {where} names {name!r}, which is no {' or '.join(endings)} file; nothing else "
            f"is read. Save the model again with safe serialization."
        )
    paths = PurePosixPath(name), PureWindowsPath(name)
    if any(path.anchor or ".." in path.parts for path in paths):
        raise InputError(
            f"load: {where} names {name!r}, which is not in that folder. Copy the weights into the "
            f"folder and name them there."
        )


def _check_counts(config: dict[str, Any], size: StoredSize, path: Path) -> None:
    """Refuse counts that no model with these weights has: configurations make lists by them."""
    limits = (_LAYERS, size.most_modules), (_ROWS, max(size.elements, _SPARE_ROWS))
    for key, value in _entries(config):
        for counted, most in limits:
            numbers = value if isinstance(value, list) else [value]
            wrong = [n for n in numbers if type(n) is int and n > most]
            if wrong and counted.search(key):
                raise InputError(
                    f"load: {path} has {key}={wrong[0]}, but the weight files hold "
                    f"{size.elements:,} weights in {size.tensors:,} tensors. Give the "
                    f"configuration that belongs to them."
                )


def _is_fetched(name: str) -> bool:
    # With the package `kernels`, transformers takes flash attention from the hub.
    return "/" in name or ("flash" in name and find_spec("kernels") is not None)


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Each key and value of a configuration and of those within it."""
    waiting = [config]
    while waiting:
        content = waiting.pop()
        if isinstance(content, dict):
            yield from content.items()
            waiting += content.values()
        elif isinstance(content, list):
            waiting += content


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, as transformers says what is wrong."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_tokenizer_class(folder: Path) -> None:
    """Refuse a tokenizer's class that is no tokenizer: transformers would open that instead.

    Raises:
        InputError: the configuration of the tokenizer, or of the model, names such a class.
    """
    import transformers

    for path in (folder / "tokenizer_config.json", folder / CONFIG):
        name = read_object(path).get("tokenizer_class")
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        tokenizers = (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)
        missing = type(cls).__name__ == "DummyObject"  # it needs a package that is not installed
        if cls is None or missing or (isinstance(cls, type) and issubclass(cls, tokenizers)):
            continue
        raise InputError(
            f"load_tokenizer: {path} has tokenizer_class={name!r}, which is no tokenizer. Save the "
            f"tokenizer beside the model again."
        )
