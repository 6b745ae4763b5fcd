"""Open a model: safetensors with JSON, or GGUF, never a pickle, no remote code."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from headwise._display import did_you_mean, first_line, type_of
from headwise._extras import require
from headwise.attention import set_attention
from headwise.checkpoints._folder_checks import (
    check_complete,
    check_folder,
    check_size,
    check_tokenizer_class,
    fetch,
    fetched,
)
from headwise.checkpoints._gguf_load import find_gguf, load_gguf, load_gguf_tokenizer
from headwise.checkpoints._manifest import (
    CHANGED,
    ORIGINAL,
    apply_changes,
    changed_class,
    read_manifest,
    read_original,
    sketch,
)
from headwise.checkpoints._per_layer import read_layers
from headwise.checkpoints._source_files import TOKENIZER_FILES
from headwise.errors import ArgumentError, HeadwiseError, InputError
from headwise.lab import read_model, read_tokenizer
from headwise.models import check_device, progress_bar_in_terminals_only

# As the hub allows them: an owner and a slash may stand before the name.
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def load(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> nn.Module:
    """Open a model in evaluation mode, with all of its weights.

    Only JSON, safetensors and GGUF are read, and only from the folder or hub model itself: an index
    of shards that names a pickle or a file outside it is refused. Links in a folder are followed,
    because the cache of the hub consists of links. No code is run, neither code beside the
    weights nor kernels of the hub that a configuration names. Adapters (`adapter_config.json`) are
    refused, not applied. A configuration that describes a far larger model than its weight files
    contain is refused before memory of that size is allocated.

    A GGUF file is read by transformers, which turns quantized weights into floats: the model takes
    several times the memory of the file, and `save` writes it as any other. Saved once, it opens
    faster, since the vocabulary of a GGUF file is read in Python.

    Args:
        source: A folder written by this library or by Hugging Face, a GGUF file or a folder with
            one, or a name on the hub.
        device: The device of the weights.
        dtype: The dtype of the weights. None keeps the dtype in which they were saved, and is
            float32 for a GGUF file.
        attn_implementation: What computes attention: "headwise" for the kernels of `attend`, which
            is registered first (see `register_attention`), or a name that transformers has, such
            as "sdpa" or "eager". None leaves the choice to transformers.
    Raises:
        ArgumentError: there is no such implementation, device or dtype, or the model cannot use
            the implementation.
        UnsupportedError: the model does not let its attention be chosen.
        InputError: there is no such folder, file or name, or weights are missing, broken, pickled,
            outside the folder, adapters, not of the size that the configuration says, or of an
            architecture that transformers does not read from GGUF.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"load: dtype={dtype!r} is no dtype. Give one, as torch.bfloat16.")
    device = check_device(device, "load: device")
    _check_source(source, "load")
    file = find_gguf(source, "load")
    folder = None if file else _folder(source, "load")
    manifest = None if folder is None else read_manifest(folder)
    model: nn.Module
    if file:
        model = load_gguf(file)
    elif folder is None or manifest is None:
        if folder is None:
            _refuse_unreachable(str(source))
        model = _from_hugging_face(source, folder)
    elif manifest.get("format") == CHANGED:
        model = _from_hugging_face(source, folder, changed_class(manifest, folder))
    else:
        model = read_model(folder, manifest, apply_changes)
    if attn_implementation is not None:
        set_attention(model, attn_implementation)
    return model.to(device=device, dtype=dtype).eval()


def load_tokenizer(source: str | Path) -> Any:
    """Open the tokenizer of a model.

    Raises:
        InputError: there is none, or it cannot be opened.
    """
    _check_source(source, "load_tokenizer")
    if file := find_gguf(source, "load_tokenizer"):
        return load_gguf_tokenizer(file)
    folder = _folder(source, "load_tokenizer")
    manifest = None if folder is None else read_manifest(folder)
    if folder is not None and manifest is not None and manifest.get("format") != CHANGED:
        return read_tokenizer(folder)
    transformers = require("transformers", "hf", "load_tokenizer")
    # Without a file transformers may return a tokenizer to which every word is unknown.
    if folder is not None and not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        raise InputError(
            f"load_tokenizer: {source} has no tokenizer that can be opened (no file of one is "
            f"there). Save the tokenizer beside the model."
        )
    try:
        checked = folder
        for name in () if folder else ("tokenizer_config.json", "config.json"):
            checked = path.parent if (path := fetched(str(source), name)) else checked
        if checked is not None:
            check_tokenizer_class(checked)
        return transformers.AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except HeadwiseError:
        raise
    except Exception as error:  # transformers raises anything from OSError to TypeError here
        if folder is None:
            raise InputError(f"load_tokenizer: {source} {_unreachable(source, error)}") from error
        raise InputError(
            f"load_tokenizer: {source} has no tokenizer that can be opened ({first_line(error)}). "
            f"Save the tokenizer beside the model."
        ) from error


def load_processor(source: str | Path) -> Any:
    """Open the processor of a model of images: of images and text, or of images alone.

    Raises:
        InputError: there is none, or it cannot be opened.
    """
    _check_source(source, "load_processor")
    transformers = require("transformers", "hf", "load_processor")
    try:
        return transformers.AutoProcessor.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # transformers raises anything from OSError to TypeError here
        raise InputError(
            f"load_processor: {source} has no processor of images that can be opened "
            f"({first_line(error)}). Save the processor beside the model."
        ) from error


def _check_source(source: Any, caller: str) -> None:
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            f"{caller}: source is {type_of(source)}. Give a model's folder or a hub name."
        )
    name = str(source)
    if "\0" in name or not name.strip():
        raise InputError(
            f"{caller}: {name!r} is not a folder. Give a model's folder or a hub name."
        )


def _folder(source: str | Path, caller: str) -> Path | None:
    """The source as a folder, or None for a hub name."""
    path, name = Path(source), str(source)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("headwise.json", "config.json")):
            inner = next((config.parent for config in sorted(path.glob("*/config.json"))), None)
            raise InputError(
                f"{caller}: {path} holds neither headwise.json nor config.json. Give a model's "
                f"folder{f', such as {inner}' if inner else ''}."
            )
        for inner in (*path.glob("*"), *path.glob("*/*")):  # a SentenceTransformer has folders
            if inner.exists() and not (inner.is_file() or inner.is_dir()):
                raise InputError(
                    f"{caller}: {inner} is a pipe, a socket or a device, and only regular files "
                    f"are read. Give a folder without it."
                )
        _refuse_pickles(path)
        return path
    if path.exists():
        raise InputError(
            f"{caller}: {path} is a file, not a folder. Give the folder of a model, which holds "
            f"config.json, a file that ends in .gguf, or a hub name."
        )
    if not _HUB_NAME.fullmatch(name):
        raise InputError(
            f"{caller}: {path} is not a folder.{_nearest_folder(path)} Give a model's folder or "
            f"a hub name."
        )
    return None


def _nearest_folder(path: Path) -> str:
    """The folder whose name is nearest to that of one that does not exist, as a question."""
    with suppress(OSError):
        names = [beside.name for beside in path.parent.iterdir() if beside.is_dir()]
        return did_you_mean(path.name, names)
    return ""


def _refuse_pickles(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"load: {folder} has only {pickles[0]}, a pickle, and pickles can run code. "
            f"Convert it to model.safetensors."
        )
    raise InputError(f"load: {folder} has no .safetensors file. Give a folder with weights.")


def _refuse_unreachable(name: str) -> None:
    """Query the hub once, because without a connection its client retries for half a minute."""
    hub = require("huggingface_hub", "hf", "load")
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    cached = isinstance(hub.try_to_load_from_cache(name, "config.json"), str)
    if cached or hub.is_offline_mode():
        return
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=10)
    except Exception as error:  # the HTTP library decides which one
        responded = isinstance(error, HfHubHTTPError)
        if responded and not isinstance(error, RepositoryNotFoundError):
            return  # it exists but is busy or needs a token, which its client handles
        raise InputError(f"load: {name} {_unreachable(name, error)}") from error


def _from_hugging_face(source: str | Path, folder: Path | None, cls: Any = None) -> nn.Module:
    require("transformers", "hf", "load")
    try:
        checked = folder or fetch(str(source))
        size = None if checked is None else check_folder(checked)
        # Open the revision that was checked, not one that was pushed since.
        pinned = {} if folder or checked is None else {"revision": checked.name}
        config, cls = (None, cls) if checked is None else read_layers(checked, cls)
        cls, found = _model_class(str(source), cls, **pinned)
        if size is not None:
            # `AutoModel` is not built by itself.
            build = getattr(cls, "from_config", cls)
            check_size(sketch(build, config or found), size, source)
        with progress_bar_in_terminals_only():
            model, report = cls.from_pretrained(
                str(source),
                config=config,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **pinned,
            )
    except HeadwiseError:
        raise
    except Exception as error:  # transformers raises anything from OSError to KeyError here
        raise InputError(f"load: {source} {_why_not(error, source, folder)}") from error
    check_complete(model, report["missing_keys"], source)
    read_original(getattr(model.config, ORIGINAL, None), str(source))
    return model


def _why_not(error: Exception, source: str | Path, folder: Path | None) -> str:
    """The reason why a model cannot be opened, and what to do."""
    line = first_line(error)
    if isinstance(error, SafetensorError):
        return f"has weights that are broken or cut short ({line}). Copy or save it again."
    if "ignore_mismatched_sizes" in str(error):  # the details are only in a log
        return (
            "cannot be opened: its weights have other sizes than its configuration says. A pruned "
            "model must be written by headwise.save."
        )
    if folder:
        return f"cannot be opened ({line}). Give a model's folder or a hub name."
    return _unreachable(source, error)


def _unreachable(source: str | Path, error: Exception) -> str:
    return (
        f"is neither a folder nor a reachable hub model ({first_line(error)})."
        f"{_nearest_folder(Path(source))} Give a model's folder or a hub name."
    )


def _model_class(source: str, known: Any, **pinned: str) -> tuple[Any, Any]:
    """The class, if it is known, or that which the checkpoint names, if transformers has it, else
    the one of `AutoModel`; and its configuration."""
    import transformers

    if known is not None:  # some configurations, as of Bark's parts, have no name
        return known, known.config_class.from_pretrained(source, **pinned)
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **pinned)
    for name in config.architectures or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls, config
    return transformers.AutoModel, config
