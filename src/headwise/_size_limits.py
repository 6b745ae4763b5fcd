"""Limits on the size of a model relative to its weight files.

A configuration of a few bytes can describe a model of any size. The headers of the weight files
are read first; then the modules, parameters and buffers of the model are counted as they are
created, and construction stops once the count is far beyond what the files hold.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from headwise.errors import InputError

# A shared weight may be created several times before it is tied.
_TIES = 16
# Allowed for any model: 64 MiB of float32 weights, 512 MiB of masks and position tables.
_SPARE_ELEMENTS, _SPARE_BYTES = 2**24, 2**29
# Modules without weights, such as dropout and activations, come on top of those with weights.
_MODULES_PER_TENSOR, _SPARE_MODULES = 64, 4096
T = TypeVar("T", bound=nn.Module)
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredSize:
    """The number of tensors in weight files and their total number of elements."""

    tensors: int
    elements: int

    def __add__(self, other: "StoredSize") -> "StoredSize":
        return StoredSize(self.tensors + other.tensors, self.elements + other.elements)

    @property
    def most_modules(self) -> int:
        """The limit on the number of modules of a model with these weights."""
        return _MODULES_PER_TENSOR * self.tensors + _SPARE_MODULES

    @property
    def most_elements(self) -> int:
        """The limit on the number of parameters of a model with these weights."""
        return _TIES * self.elements + _SPARE_ELEMENTS

    @property
    def most_bytes(self) -> int:
        """The limit on the bytes of buffers of a model with these weights."""
        return 4 * _TIES * self.elements + _SPARE_BYTES


def stored_size(paths: Iterable[Path], packed: bool = False) -> StoredSize:
    """The size of the content of safetensors files, read from their headers.

    Args:
        packed: Whether an element may hold several quantized weights. Each of its bits then
            counts as a weight, unless the dtype is one of the usual floats.
    Raises:
        SafetensorError: one of them is not a complete safetensors file.
    """
    tensors, elements = 0, 0
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                count = prod(part.get_shape())
                tensors += 1
                elements += count * (_bits(part.get_dtype()) if packed else 1)
    return StoredSize(tensors, elements)


def _bits(dtype: str) -> int:
    """The largest number of weights that one element may hold: I32 holds 32 of one bit."""
    width = re.search(r"\d+", dtype)
    return 1 if dtype in _FLOATS else int(width[0]) if width else 8


@contextmanager
def limit_model_size(stored: StoredSize, source: object) -> Iterator[None]:
    """Stop the construction of a model in this block if it is far larger than its weight files.

    Only modules that this thread creates are counted.

    Raises:
        InputError: the model exceeds a limit.
    """
    count = _Count(stored, source, threading.get_ident())
    with ExitStack() as hooks:
        for register, hook in (
            (register_module_module_registration_hook, count.add_module),
            (register_module_parameter_registration_hook, count.add_parameter),
            (register_module_buffer_registration_hook, count.add_buffer),
        ):
            hooks.callback(register(hook).remove)
        yield


def build_to_fit(build: Callable[[], T], weights: Mapping[str, Tensor], path: Path) -> T:
    """A model with the weights of a file, in their dtype.

    It is first built on the meta device, because a file of a few bytes can name sizes that exhaust
    the memory.

    Raises:
        InputError: the model is far larger than the weights, or has other names or shapes.
    """
    stored = StoredSize(len(weights), sum(x.numel() for x in weights.values()))
    with limit_model_size(stored, path.parent), torch.device("meta"):
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


class _Count:
    """Counts what has been created. A weight that replaces another counts once."""

    def __init__(self, stored: StoredSize, source: object, thread: int) -> None:
        self._stored, self._source, self._thread = stored, source, thread
        self._modules = 0
        self._sizes: dict[str, dict[tuple[int, str], int]] = {"parameters": {}, "buffers": {}}
        self._totals = {"parameters": 0, "buffers": 0}

    def add_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and threading.get_ident() == self._thread:
            self._modules += 1
            self._check("modules", self._modules, self._stored.most_modules)

    def add_parameter(self, module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        if weight is not None and not nn.parameter.is_lazy(weight):
            self._replace("parameters", module, name, weight.numel(), self._stored.most_elements)

    def add_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if buffer is not None and not nn.parameter.is_lazy(buffer):
            size = buffer.numel() * buffer.element_size()
            self._replace("buffers", module, name, size, self._stored.most_bytes)

    def _replace(self, kind: str, module: nn.Module, name: str, size: int, most: int) -> None:
        if threading.get_ident() != self._thread:
            return
        place = (id(module), name)
        self._totals[kind] += size - self._sizes[kind].get(place, 0)
        self._sizes[kind][place] = size
        self._check(f"bytes of {kind}" if kind == "buffers" else kind, self._totals[kind], most)

    def _check(self, kind: str, count: int, most: int) -> None:
        if count > most:
            raise InputError(
                f"load: the configuration of {self._source} describes a model of more than "
                f"{most:,} {kind}, but its weight files hold {self._stored.elements:,} weights in "
                f"{self._stored.tensors:,} tensors. Use the configuration that belongs to them."
            )
