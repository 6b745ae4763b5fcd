"""Safety checks of a Hugging Face folder, or a model of the hub, before transformers opens it.

Only safetensors inside the folder are read, no code is fetched, no adapter is applied, and the
configuration must describe a model of about the size of the stored weights. Of a model of the hub
the small files are checked before its weights are downloaded.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from headwise._display import counted
from headwise.errors import InputError

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Keys of a configuration that choose the code of attention, or of the experts of a mixture.
_KERNELS = re.compile(r"_?(attn|experts)_implementation")
# Keys that count modules, for which objects are allocated; and keys that count rows of a weight.
_LAYERS = re.compile(r"layers?$|depths?$|blocks$|stages$|block_count$")
_ROWS = re.compile(r"num_labels$|heads?$|experts$|groups$|expert_count$|head_count(_kv)?$")
# More labels than any real configuration has without storing their classification head.
_SPARE_ROWS = 2**20
_SPARE_LAYERS = 4096  # in configurations whose weights are few, or shared by layers
# Beyond the stored weights: those that are made anew or stored once for several places.
_TIES, _SPARE_WEIGHTS = 16, 2**24
_PACKED = 32  # quantized weights that one stored element may hold


# The number of tensors in weight files and their total number of elements.
StoredSize = tuple[int, int]


def _stored_size(paths: Iterable[Path]) -> StoredSize:
    """The size of the content of safetensors files, by their headers."""
    tensors, elements = 0, 0
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors += 1
                elements += prod(file.get_slice(name).get_shape())
    return tensors, elements


def check_size(model: nn.Module, size: StoredSize, source: object) -> None:
    """Refuse a model, built on the meta device, that is far larger than its weight files."""
    weights, (tensors, elements) = sum(x.numel() for x in model.parameters()), size
    if weights > _TIES * elements + _SPARE_WEIGHTS:
        raise InputError(
            f"load: the configuration of {source} describes a model of {weights:,} weights, but "
            f"its files hold {elements:,} in {tensors:,} tensors. Use the configuration "
            f"that belongs to them."
        )


def check_complete(model: nn.Module, missing: Iterable[str], source: object) -> None:
    """Refuse a model whose weights are not all in its files: the others are random."""
    names = sorted(missing)
    if names:
        raise InputError(
            f"load: {source} lacks {counted(len(names), 'weight')} of {type(model).__name__}, such "
            f"as {names[0]}. Give the whole checkpoint."
        )


def check_folder(folder: Path) -> StoredSize:
    """Refuse an unsafe folder, reading only JSON and the headers of weight files.

    Links in the folder are followed, because the files in the cache of the hub are links; their
    targets are read as safetensors or JSON all the same.

    Returns:
        The number of weights and tensors in the folder.
    Raises:
        InputError: there are adapters, weights outside the folder or not in safetensors, kernels
            of the hub, or far more layers than the weights allow.
        SafetensorError: a file of weights is broken.
    """
    refuse_adapter(folder)
    config = _checked_config(folder)
    files = _weight_files(folder, config)
    tensors, elements = _stored_size(files)
    for path in {*folder.glob("*.safetensors")} - {*files}:
        with suppress(SafetensorError, OSError):  # a few models read some of these files too
            more = _stored_size([path])
            tensors, elements = tensors + more[0], elements + more[1]
    if any(key == "quantization_config" for key, _ in _entries(config)):
        elements *= _PACKED
    check_counts(config, (tensors, elements), folder / CONFIG)
    return tensors, elements


def fetch(name: str) -> Path | None:
    """Download a model, and return its folder in the cache.

    Returns:
        None if its main revision has no safetensors file; transformers then looks for a revision
        with converted weights.
    Raises:
        InputError: there are adapters, kernels of the hub, or weights not in safetensors.
        OSError: there is no such name, or the hub cannot be reached.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    adapter = fetched(name, ADAPTER)
    if adapter is not None:  # before anything else, since a folder of an adapter may hold no more
        refuse_adapter(adapter.parent)
    folder = Path(cached_file(name, CONFIG)).parent
    config = _checked_config(folder)
    named = _named_weights(folder, config)
    weights = fetched(name, named or WEIGHTS)
    if weights is None and named is None:
        weights = fetched(name, INDEX)
    if weights is None:
        return None
    if weights.suffix == ".json":
        _names_in_index(weights)
        get_checkpoint_shard_files(name, str(weights))
    return folder


def fetched(name: str, file: str) -> Path | None:
    """A file of a hub model in the cache; None if it does not exist or cannot be reached."""
    from transformers.utils.hub import cached_file

    quiet: dict[str, Any] = {
        f"_raise_exceptions_for_{problem}": False
        for problem in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(name, file, **quiet)
    return None if path is None else Path(path)


def refuse_adapter(folder: Path) -> None:
    """Refuse adapters beside the weights, which transformers would apply silently."""
    path = folder / ADAPTER
    if path.exists():
        adapter = read_config(path)
        base = adapter.get("base_model_name_or_path")
        raise InputError(
            f"load: {folder} holds {ADAPTER}, an adapter ({adapter.get('peft_type')!r}) of "
            f"{base!r}, which load does not apply. Merge it with peft's merge_and_unload and save "
            f"the result, or move it elsewhere to open the weights without it."
        )


def _checked_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder. One that names a kernel of the hub is refused, since
    transformers would fetch its code and run it."""
    config = read_config(folder / CONFIG)
    for key, value in _entries(config):
        names = value.values() if isinstance(value, dict) else [value]
        for name in names if _KERNELS.fullmatch(key) else ():
            if isinstance(name, str) and _is_fetched(name):
                raise InputError(
                    f"load: {folder / CONFIG} has {key}={name!r}, a kernel whose code would be "
                    f"fetched from the hub and run. Remove {key} from the file."
                )
    return config


def _is_fetched(name: str) -> bool:
    # If the package `kernels` is installed, transformers fetches flash attention from the hub.
    return "/" in name or ("flash" in name and find_spec("kernels") is not None)


def _weight_files(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The existing files that transformers would read the weights from."""
    named = _named_weights(folder, config)
    first = folder / (named or WEIGHTS)
    if named is None and not first.is_file():
        first = folder / INDEX
    if not first.is_file():
        return []
    if first.name.endswith(".safetensors"):
        return [first]
    return [folder / name for name in _names_in_index(first) if (folder / name).is_file()]


def _named_weights(folder: Path, config: dict[str, Any]) -> str | None:
    """The weight file, or index of weight files, that a configuration names."""
    named = config.get("transformers_weights")
    if named is not None:
        _check_weights_name(named, folder / CONFIG, (".safetensors", ".safetensors.index.json"))
    return named


def _names_in_index(index: Path) -> list[str]:
    """The names of the files in an index of shards."""
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"load: {index} has no weight_map. Copy or save the model again.")
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    for name in sorted(names):
        _check_weights_name(name, index, (".safetensors",))
    return sorted(names)


def _check_weights_name(name: Any, source: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse the name of a weight file that is not in safetensors, or outside its folder."""
    if not isinstance(name, str) or not name.endswith(suffixes):
        raise InputError(
            f"load: {source} names {name!r}, which is not a {' or '.join(suffixes)} file; nothing "
            f"else is read. Save the model again with safe serialization."
        )
    paths = PurePosixPath(name), PureWindowsPath(name)
    if any(path.anchor or ".." in path.parts for path in paths):
        raise InputError(
            f"load: {source} names {name!r}, which is not in that folder. Copy the weights into "
            f"the folder and name them there."
        )


def check_counts(config: dict[str, Any], size: StoredSize, path: Path) -> None:
    """Refuse counts that are too large for these weights: transformers allocates lists by them."""
    tensors, elements = size
    limits = (_LAYERS, tensors + _SPARE_LAYERS), (_ROWS, max(elements, _SPARE_ROWS))
    for key, value in _entries(config):
        for pattern, limit in limits:
            numbers = value if isinstance(value, list) else [value]
            excessive = [n for n in numbers if type(n) is int and n > limit]
            if excessive and pattern.search(key):
                raise InputError(
                    f"load: {path} has {key}={excessive[0]}, but the weight files hold "
                    f"{elements:,} weights in {tensors:,} tensors. Give the "
                    f"configuration that belongs to them."
                )


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Each key and value of a configuration and of the configurations nested in it."""
    pending = [config]
    while pending:
        content = pending.pop()
        if isinstance(content, dict):
            yield from content.items()
            pending += content.values()
        elif isinstance(content, list):
            pending += content


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if unreadable, because transformers reports the problem.

    It is read as transformers reads it, which takes numbers and keys that our own files never hold.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_tokenizer_class(folder: Path) -> None:
    """Refuse a `tokenizer_class` that is not a tokenizer, because transformers would open it."""
    import transformers

    for path in (folder / "tokenizer_config.json", folder / CONFIG):
        name = read_config(path).get("tokenizer_class")
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        tokenizers = (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)
        missing = type(cls).__name__ == "DummyObject"  # a package that it needs is not installed
        if cls is None or missing or (isinstance(cls, type) and issubclass(cls, tokenizers)):
            continue
        raise InputError(
            f"load_tokenizer: {path} has tokenizer_class={name!r}, which is not a tokenizer. Save "
            f"the tokenizer beside the model again."
        )
