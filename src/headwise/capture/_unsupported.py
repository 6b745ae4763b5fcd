"""Calls that are not attention between the tokens of a text."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from headwise.capture._attention_modules import n_heads_of
from headwise.capture._call import AttentionCall
from headwise.capture._running_calls import ModuleCall


class Unsupported(NamedTuple):
    """Why a call is not attention between the tokens of a text.

    Attributes:
        is_layer: Whether the model mixes tokens or channels by it: with what is captured alone,
            a layer would be missing.
    """

    reason: str
    is_layer: bool = True


def why_unsupported(call: AttentionCall, around: Iterable[ModuleCall]) -> Unsupported | None:
    """Why a call is not attention between the tokens of a text; None if it is.

    The shapes of the module's inputs decide: a layer that receives windows attends within texts.

    Args:
        around: The calls of all modules that run.
    """
    shape = None if call.module_call is None else call.module_call.shape
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    if shape is None or T in shape[1:]:
        return None
    among = f"attends among {T} positions where it was given {shape[1]} tokens"
    if shape[1] > T and T not in shape and _are_chunks(call.module, H):
        return Unsupported(among)
    if any(outer.n_ids == T for outer in around):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return Unsupported(f"attends among {T} channels of each head, not among tokens")
    if shape[1] != S and (shape[1] == H or B * T == shape[0] * shape[1] == B):
        # Such as the outputs of earlier layers, of which each token has its own.
        return Unsupported(f"attends among {S} positions for each of {shape[1]} tokens", False)
    windows = shape[0] * shape[1] == B * T
    return Unsupported(among) if shape[1] > T and T == S and not windows else None


def _are_chunks(module: nn.Module, H: int) -> bool:
    """Whether `H` heads are several chunks of the heads that a module declares."""
    heads = n_heads_of(module)
    return 1 < heads < H and H % heads == 0
