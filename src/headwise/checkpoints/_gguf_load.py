"""Open a GGUF file through transformers' own reader, which turns its weights into floats.

A file from a stranger is checked first: nothing in it is code, but its numbers decide how much
memory is taken. The reader of gguf loops over whatever counts a file claims, so every count is
walked through once by one that stops at the end of the file.
"""

import io
import sys
from contextlib import nullcontext, redirect_stderr
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from headwise._display import first_line
from headwise._extras import require
from headwise._progress import progress_bar
from headwise.checkpoints._folder_checks import (
    StoredSize,
    check_complete,
    check_counts,
    check_size,
    refuse_adapter,
)
from headwise.checkpoints._manifest import sketch
from headwise.errors import HeadwiseError, InputError
from headwise.models import WEIGHTS_FROM, progress_bar_in_terminals_only

_ENDING = ".gguf"
# Entries of all lists together: gguf's reader takes half a kilobyte for each. A vocabulary of
# 262,144 tokens has about a million.
_MOST_ENTRIES = 2**22


class _AllKeys:
    """Whose lists of texts the reader is to return: it returns the length of the others."""

    def __contains__(self, key: str) -> bool:
        return True


def find_gguf(source: Any, caller: str) -> Path | None:
    """The GGUF file that a source names, or the only one in a folder without safetensors."""
    path = Path(source)
    if path.suffix.lower() == _ENDING and not path.is_dir():
        if not path.is_file():
            raise InputError(f"{caller}: {path} is not a file. Give the path of a GGUF file.")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == _ENDING)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InputError(f"{caller}: {path} holds several models: {names}. Give one of the files.")
    return files[0] if files else None


def load_gguf(path: Path) -> nn.Module:
    """The model in a file, in float32.

    Most of the time goes into lists that gguf's reader walks through in Python, once for the sizes
    and once for the weights: 12 of 21 seconds for a vocabulary of 49,152 tokens.
    """
    metadata, size = _check(path, "load")
    refuse_adapter(path.parent)
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # The reader's own bar is shown in terminals alone; its warnings go to a log.
    silent = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with (
        progress_bar(f"Opening {path.name}") as on_progress,
        progress_bar_in_terminals_only(),
        silent,
    ):
        try:
            on_progress(0, 2, "sizes")
            config = transformers.AutoConfig.from_pretrained(**place)
            cls = _class_of(config)
            check_size(sketch(getattr(cls, "from_config", cls), config), size, path)
            on_progress(1, 2, "weights")
            model, report = cls.from_pretrained(
                **place,
                config=config,
                # Without this some architectures run kernels that are fetched from the hub.
                quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        except HeadwiseError:
            raise
        except Exception as error:  # the reader raises anything from KeyError to IndexError
            raise InputError(f"load: {path} {_why_not(error, metadata)}") from error
    check_complete(model, report["missing_keys"], path)
    kind = _quantization(metadata)
    if kind:
        setattr(model.config, WEIGHTS_FROM, kind)
    return model


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a file, with its chat template."""
    _check(path, "load_tokenizer")
    import transformers
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    # Not AutoTokenizer, which would take a tokenizer.json of another model beside the file, and
    # reads the sizes of the model first, for five seconds.
    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(path))
        backend, more = convert_gguf_tokenizer(architecture, vocabulary)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    except Exception as error:  # a KeyError where the file has no vocabulary
        raise InputError(
            f"load_tokenizer: {path} has no tokenizer that can be opened ({first_line(error)}). "
            f"Give a file with a vocabulary."
        ) from error


def _check(path: Path, caller: str) -> tuple[dict[str, Any], StoredSize]:
    """The metadata of a file, and its number of tensors and weights."""
    gguf = require("gguf", "gguf", caller)
    require("accelerate", "gguf", caller)
    reader = require("transformers.integrations.gguf", "gguf", caller)
    try:
        metadata, names = reader.read_gguf_metadata(str(path), _AllKeys())
        entries = sum(len(value) for value in metadata.values() if isinstance(value, list))
        if entries > _MOST_ENTRIES:
            raise ValueError(f"its lists have {entries:,} entries")
        try:
            table = reader.GgufHeader.from_file(str(path)).tensors
            sizes = [(prod(tensor.shape), tensor.nbytes) for tensor in table]
        except ValueError:  # it knows no Q5_0, for one; gguf knows all, and takes 100 times as long
            tensors = gguf.GGUFReader(path).tensors
            sizes = [(int(tensor.n_elements), int(tensor.n_bytes)) for tensor in tensors]
        stored = sum(size for _, size in sizes)
        if stored > path.stat().st_size:
            raise ValueError(f"its tensors claim {stored:,} bytes of {path.stat().st_size:,}")
    except Exception as error:  # such as a struct.error, or a ZeroDivisionError
        raise InputError(
            f"{caller}: {path} is not a whole GGUF file ({first_line(error)}). Download or write "
            f"it again."
        ) from error
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise InputError(
            f"{caller}: {path} is one of {parts} parts, and one file is read. Merge them with "
            f"llama.cpp's llama-gguf-split --merge."
        )
    size = len(names), sum(elements for elements, _ in sizes)
    check_counts(metadata, size, path)
    return metadata, size


def _class_of(config: Any) -> Any:
    """The class of the model that a file describes."""
    import transformers

    for name in config.architectures or ():
        return getattr(transformers, name)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _why_not(error: Exception, metadata: dict[str, Any]) -> str:
    architecture = metadata["general.architecture"]
    known = _known_architectures()
    if architecture not in known and "not supported" in str(error):
        return (
            f"is of the architecture {architecture!r}, which transformers does not read. It reads "
            f"{', '.join(known)}. Give another model, or a folder of this one in safetensors."
        )
    if "ignore_mismatched_sizes" in str(error):  # the details are only in a log
        return (
            "cannot be opened: its weights have other sizes than transformers takes from its "
            "metadata. Give a folder of the model in safetensors."
        )
    return f"cannot be opened ({first_line(error)}). Give another file of the model."


def _known_architectures() -> list[str]:
    """What transformers reads; its table has sections for other fields too."""
    from transformers.integrations.gguf import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS} - {"general", "tokenizer"})


def _quantization(metadata: dict[str, Any]) -> str:
    """What most weights are stored as, such as Q4_1; empty for floats."""
    import gguf

    try:
        name = gguf.LlamaFileType(metadata.get("general.file_type", -1)).name
    except ValueError:
        return ""
    kind = name.removeprefix("MOSTLY_")
    return "" if kind in ("ALL_F32", "F16", "BF16", "GUESSED") else kind
