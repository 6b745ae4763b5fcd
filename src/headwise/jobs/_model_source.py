"""The model of a job: in memory, or opened by each process, and hashed once."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headwise.errors import ArgumentError
from headwise.models import (
    check_model,
    fingerprint,
    iter_pieces,
    load,
    load_tokenizer,
    tokenizer_of,
)

# The header of a safetensors file begins with its length in 8 bytes.
_HEADER_START = 8
# A text whose tokens show how a tokenizer cuts and changes texts.
_PROBE = "The Cat's naïve 3rd  try:\n北京 IS ok…"

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class ModelSource:
    """A model that each process of a job opens for itself.

    Attributes:
        name: A folder, or a name on the Hugging Face hub.
        device: Where it runs. With "cuda", the processes of `run(workers=n)` share the GPUs of
            the machine in turn.
        dtype: The dtype to compute in. None is that of the saved model.
        attn_implementation: What computes attention, as `load` takes it.
    """

    name: str
    device: str = "cpu"
    dtype: DtypeName | None = None
    attn_implementation: str | None = None

    def open(self, worker: int = 0) -> nn.Module:
        """The model, on the device of a worker.

        Raises:
            InputError: it cannot be opened.
        """
        device = self.device
        if device == "cuda" and torch.cuda.device_count():
            device = f"cuda:{worker % torch.cuda.device_count()}"
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return load(
            self.name, device=device, dtype=dtype, attn_implementation=self.attn_implementation
        )

    def weights(self) -> str:
        """Identifies the weight files by their sizes, times and headers, and the dtype.

        A process that finds the same files as the one that hashed them need not hash them again.
        Empty for a model that is not a folder with such files.
        """
        paths = sorted(Path(self.name).glob("*.safetensors"))
        digest = blake2b(f"{self.dtype}".encode(), digest_size=8)
        for path in paths:
            stat = path.stat()
            digest.update(f"{path.name}{stat.st_size} {stat.st_mtime_ns}".encode())
            with path.open("rb") as file:
                start = file.read(_HEADER_START)
                length = min(int.from_bytes(start, "little"), stat.st_size)
                digest.update(start + file.read(length))
        return digest.hexdigest() if paths else ""


def open_model(
    model: nn.Module | ModelSource, tokenizer: Any, worker: int
) -> tuple[nn.Module, Any]:
    """The model to run, and its tokenizer.

    Raises:
        ArgumentError: a model in memory comes without a tokenizer.
        InputError: the model or its tokenizer cannot be opened.
    """
    if isinstance(model, ModelSource):
        opened = model.open(worker)
        given = load_tokenizer(model.name) if tokenizer is None else tokenizer
        return opened, tokenizer_of(opened, given)
    resolved = tokenizer_of(model, tokenizer)
    if resolved is None:
        raise ArgumentError(f"corpus: {type(model).__name__} without a tokenizer. Give tokenizer=.")
    return check_model("corpus", model), resolved


def fingerprint_in_memory(model: nn.Module | ModelSource) -> str:
    """The fingerprint of a model in memory; empty for one that is not opened yet."""
    if isinstance(model, ModelSource):
        return ""
    return fingerprint(check_model("corpus", model))


def identify_tokenizer(tokenizer: Any, model: nn.Module) -> str:
    """Identifies a tokenizer by its vocabulary and the tokens of one text."""
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    pieces = [[*piece.source] for piece in iter_pieces(tokenizer, [(_PROBE, None)], model)]
    return blake2b(f"{vocabulary}{pieces}".encode("utf-8", "replace"), digest_size=8).hexdigest()
