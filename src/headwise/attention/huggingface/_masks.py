"""Masks of Hugging Face models in their cheapest form: a rule where one is equivalent."""

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from headwise._torch_private import can_read, is_traced
from headwise.attention._rule_mask import RuleMask
from headwise.attention.huggingface._transformers import (
    BOTH_WAYS,
    CAUSAL,
    MaskFunction,
    combined,
    eager_mask,
    is_written_for_eager,
    name_of,
    sdpa_mask,
    variables_of,
)
from headwise.masks import Mask, Window, as_mask, documents, padding

# A mask of fewer entries is computed faster than it is avoided.
FEW_ENTRIES = 1 << 16
# The makers of the two functions that keep packed texts apart.
_PACKED, _REMAPPED = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = CAUSAL,
    attention_mask: Bool[Tensor, "B S"] | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask of an attention layer, as transformers asks an implementation for it.

    Returns:
        None where no mask, or the kernel's causal flag, is equivalent, as under `sdpa`; else a
        rule, if all parts of `mask_function` are known; else booleans. Models that were written for
        `eager` get its masks: floats, and never None for a causal one.
    """
    arguments: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device, **more,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }  # fmt: skip
    dtype = torch.bool
    if is_written_for_eager(type(more.get("config"))):
        dtype, allow_is_causal_skip = more.get("dtype", torch.float32), False
    rule, n_keys = None, kv_length
    is_recorded = torch.compiler.is_compiling() or is_traced()
    may_be_rule = q_length > 1 and batch_size * q_length * kv_length >= FEW_ENTRIES
    may_be_rule = may_be_rule and torch.device(device).type == "cpu" and not use_vmap
    if may_be_rule and not is_recorded and (attention_mask is None or can_read(attention_mask)):
        seen = int(q_offset) - kv_offset + q_length  # a causal mask hides all later keys
        rule, n_keys = _rule(mask_function, attention_mask, kv_length, seen, kv_offset)
    if rule is None:
        if dtype != torch.bool and is_recorded:
            return eager_mask(**arguments)
        mask = sdpa_mask(**arguments, allow_is_causal_skip=allow_is_causal_skip)
        if mask is None or dtype == torch.bool:
            return mask
        return RuleMask.of(as_mask(mask), mask.shape, kv_length, dtype)
    visible = rule.simplify(q_length, n_keys)
    is_flag = visible == Window(None, 0) and q_length == n_keys
    if (is_flag and allow_is_causal_skip) or (visible is None and allow_is_bidirectional_skip):
        return None
    return RuleMask.of(rule, (batch_size, 1, q_length, kv_length), n_keys, dtype)


def _rule(
    function: MaskFunction, real: Bool[Tensor, "B _"] | None, S: int, seen: int, first_key: int
) -> tuple[Mask | None, int]:
    """A mask function and padding as a rule for so many keys; None if no rule is equivalent.

    Args:
        seen: Keys up to the last query.
    """
    parts = list(_parts(function, first_key, seen))
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None, S
    visible, n_keys = reduce(and_, known), S
    if visible != Window(None, None) and seen != S:
        # Rules count queries from the last key on: the unused end of a cache must be hidden.
        if seen > S or Window(None, 0) not in known:
            return None, S
        n_keys = seen
    keys = None if real is None else _real_keys(real, first_key, n_keys)
    return visible if keys is None else visible & keys, n_keys


def _parts(
    function: MaskFunction, first_key: int, seen: int, *, in_text: bool = False
) -> Iterator[Mask | None]:
    """The rules that a mask function of transformers combines, in any order; None: an unknown one.

    Args:
        in_text: Whether it reads positions within a packed text, which differ from columns by a
            constant.
    """
    functions = combined(function)
    is_packed = in_text or any(name_of(part) == _PACKED for part in functions)
    for part in functions:
        remapped = variables_of(part).get("mask_function") if name_of(part) == _REMAPPED else None
        if is_packed and remapped is not None:
            yield from _parts(remapped, first_key, seen, in_text=True)
        else:
            yield _part(part, first_key, seen, in_text)


def _part(function: MaskFunction, first_key: int, seen: int, in_text: bool) -> Mask | None:
    """The rule of one function; None if it, or a variable of it, is unknown."""
    if function is CAUSAL:
        return Window(None, 0)
    if function is BOTH_WAYS:
        return Window(None, None)
    match name_of(function), variables_of(function):
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return Window(size - 1, None)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return Window(size, size)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": Tensor() as skipped}:
            # Chunks begin anew with each packed text.
            position = torch.arange(seen) + first_key - skipped[:, None]
            return None if in_text else documents(position // size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as ids}:
            return documents(ids)
    return None


def _real_keys(real: Bool[Tensor, "B _"], first: int, n_keys: int) -> Mask | None:
    """Which keys are not padding: lengths where one side is padded; None where nothing is."""
    missing = first + n_keys - real.shape[-1]
    real = torch.nn.functional.pad(real, (0, missing)) if missing > 0 else real
    real = real[:, first : first + n_keys]
    lengths = real.sum(-1)
    if bool((lengths == n_keys).all()):
        return None
    column = torch.arange(n_keys)
    if torch.equal(real, column < lengths[:, None]):
        return padding(lengths, "right")
    if torch.equal(real, column >= n_keys - lengths[:, None]):
        return padding(lengths, "left")
    return as_mask(real[:, None, None, :])
