"""Reads and writes tensors as safetensors files, never as pickles."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headwise.errors import InputError, OutputError

Model = TypeVar("Model", bound=nn.Module)
# A zip archive (torch.save since 1.6), or the protocol byte of a bare pickle.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# A safetensors file has the length of its header in 8 bytes, the header as JSON, and the data.
_LENGTH, _LONGEST = 8, 100_000_000


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors in a safetensors file.

    Raises:
        InputError: the file cannot be read, or is not a complete safetensors file.
    """
    return read_with_metadata(path)[0]


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors in a safetensors file, as NumPy arrays.

    Raises:
        InputError: the file cannot be read, or is not a complete safetensors file.
        TypeError: NumPy has no dtype for a tensor.
    """
    return {name: tensor.numpy() for name, tensor in read_tensors(path).items()}


def read_with_metadata(
    path: str | os.PathLike[str],
    function: str = "load",
    problem: str = "is not a complete safetensors file",
    advice: str = "Copy or save it again.",
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; the rest is what an error says of it."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("it is no regular file")
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    # For an unknown dtype the library raises other errors than its own.
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if _is_pickle(path):
            raise InputError(
                f"{function}: {path} is a pickle, whatever its name says; pickles can run code. "
                f"If you trust it, convert it to safetensors."
            ) from error
        raise InputError(f"{function}: {path} {problem} ({error}). {advice}") from error


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors and metadata as safetensors.

    Raises:
        OutputError: they cannot be written, for example because the disk is full.
    """
    with output_errors(path):
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            None if metadata is None else dict(metadata),
        )


def write_arrays(arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Write NumPy arrays as safetensors.

    Raises:
        OutputError: they cannot be written, for example because the disk is full.
    """
    # torch takes no memory that is read-only or runs backwards.
    whole = {name: np.require(array, requirements=("C", "W")) for name, array in arrays.items()}
    write_tensors({name: torch.from_numpy(array) for name, array in whole.items()}, path)


@contextmanager
def output_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the library's own error to ours: it does not raise OSError on a full disk."""
    try:
        yield
    except SafetensorError as error:
        raise OutputError(
            f"save: {Path(path).parent} cannot take the weights ({error}). Free some space there."
        ) from error


def _is_pickle(path: str | os.PathLike[str]) -> bool:
    """Whether a file that is not a complete safetensors file begins like a pickle.

    The length of a safetensors header may begin with the same bytes, but a brace follows it.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(_LENGTH + 1)
    except (OSError, ValueError):
        return False
    length = int.from_bytes(start[:_LENGTH], "little")
    cut_short = start[_LENGTH:] == b"{" and length <= _LONGEST
    return start.startswith(_PICKLE_STARTS) and not cut_short


def build_to_fit(build: Callable[[], Model], weights: Mapping[str, Tensor], path: Path) -> Model:
    """A model with the weights of a file, in their dtype.

    It is first built on the meta device, because a file of a few bytes can name sizes that exhaust
    the memory.
    """
    with torch.device("meta"):
        model = build()
    for name, has, needs in misfits(weights, model.state_dict()):
        raise InputError(
            f"load: {name} in {path} is {has or 'missing'} but {needs or 'absent'} in a "
            f"{type(model).__name__} of the saved sizes. Copy or save the whole folder again."
        )
    model = build()
    model.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    return model


def misfits(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]]:
    """The names of weights of another shape than expected, and both shapes; None for no weight."""
    for name in sorted(weights.keys() | expected.keys()):
        has, needs = (tuple(x[name].shape) if name in x else None for x in (weights, expected))
        if has != needs:
            yield name, has, needs
