"""One attention to compute: its inputs, its rule, the requested extras, and its outline.

Prepared problems are kept under outlines. Calls of one outline share their checks, the choice of a
kernel and the layout of the problem. An outline holds everything that these depend on: sizes,
strides, dtypes and options, no tensor values.
"""

from collections.abc import Hashable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._library import library
from headwise._torch_private import Outline, eager_outline, under_autocast
from headwise.kernels.spec import cpu
from headwise.kernels.spec._rule import AttentionRule

Known = TypeVar("Known")
# The most outlines that are remembered: each length of a text or of a key cache has its own.
MOST_REMEMBERED = 4096


class Extras(NamedTuple):
    """What is returned besides the heads."""

    weights: bool = False
    lse: bool = False
    entropy: bool = False


HEADS_ALONE = Extras()


class AttentionProblem(NamedTuple):
    """The input of a kernel: to decide whether and how it computes this, and to compute it."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    dropout_p: float = 0.0  # the share of weights dropped
    extras: Extras = HEADS_ALONE


def outline_of(q: Tensor, k: Tensor, v: Tensor, options: Hashable) -> Outline | None:
    """The outline of some inputs and options; None where nothing may be remembered.

    That is for tensors that are not plain, are traced or mapped, or are differentiated by anything
    but the usual autograd.
    """
    return eager_outline(q, k, v, library, cpu.HAS_AMX, options)


def remember(known: dict[Outline, Known], outline: Outline, value: Known) -> Known:
    """Remember a value for an outline; when there are too many, all others are forgotten."""
    if len(known) >= MOST_REMEMBERED:
        known.clear()
    known[outline] = value
    return value


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the precision to which autocast, if it is on, casts them."""
    if not under_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
