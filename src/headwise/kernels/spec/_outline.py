"""Outlines: by what a problem is recognized, so that it is looked into once.

A call of the outline of an earlier one is checked, chosen for and laid out as that one was. The
outline is all that any of this reads: neither numbers of tensors nor anything of a tracer.
"""

from collections.abc import Hashable
from typing import TypeVar

import torch
from torch import Tensor

from headwise._library import library
from headwise._torch_private import is_eager
from headwise.kernels.spec import cpu

Outline = tuple[Hashable, ...]
Known = TypeVar("Known")
# Outlines that are remembered: each length of a text, or of a cache of keys, is one.
MOST_REMEMBERED = 4096


def outline_of(q: Tensor, k: Tensor, v: Tensor, words: Hashable) -> Outline | None:
    """The outline of inputs with the words about them; None where none may be remembered.

    None is for what is not a plain tensor, is traced or mapped, or is differentiated by anything
    but the usual autograd.
    """
    if not is_eager(q, k, v):
        return None
    learns = torch.is_grad_enabled()
    return (
        q.shape, q.stride(), q.dtype, q.device, learns and q.requires_grad,
        k.shape, k.stride(), k.dtype, k.device, learns and k.requires_grad,
        v.shape, v.stride(), v.dtype, v.device, learns and v.requires_grad,
        library(), cpu.HAS_AMX, torch.get_num_threads(), under_autocast(q), words,
    )  # fmt: skip


def remember(known: dict[Outline, Known], outline: Outline, what: Known) -> Known:
    """Remember something about an outline; when there are too many, all others are forgotten."""
    if len(known) >= MOST_REMEMBERED:
        known.clear()
    known[outline] = what
    return what


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor; some, such as meta, have none."""
    kind = x.device.type
    if kind in ("cpu", "cuda"):  # torch.compile of torch 2.11 cannot ask whether they have it
        return torch.is_autocast_enabled(kind)
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the precision to which autocast, if it is on, casts them."""
    if not under_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
