"""Masks of Hugging Face models in their cheapest form: a rule where one is equivalent."""

from collections.abc import Callable, Iterator
from functools import reduce
from operator import and_
from types import CellType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from headwise._torch_private import can_read, is_traced
from headwise.masks import Mask, Window, as_mask, documents, padding
from headwise.models.attention._rule_mask import RuleMask
from headwise.models.attention.huggingface._source import is_written_for_eager

# A mask of fewer entries is computed faster than it is avoided.
FEW_ENTRIES = 1 << 16
MaskFunction = Callable[..., Any]
_EMPTY = CellType()
# The makers of functions that transformers combines, and of the two that keep packed texts apart.
_ALL, _PACKED = "and_masks", "packed_sequence_mask_function"
_REMAPPED = "remap_positions_for_packed_sequence"


class _Lengths(NamedTuple):
    """Where the queries and keys of a mask are: at these positions of their text."""

    B: int
    T: int
    S: int
    first_query: int
    first_key: int

    @property
    def n_keys(self) -> int:
        """Keys up to the last query, beyond which a causal mask hides all."""
        return self.first_query - self.first_key + self.T


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
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
    rule, is_recorded = None, torch.compiler.is_compiling() or is_traced()
    n_entries = batch_size * q_length * kv_length
    if not (is_recorded or use_vmap) and _may_be_rule(n_entries, q_length, device, attention_mask):
        at = _Lengths(batch_size, q_length, kv_length, int(q_offset), kv_offset)
        rule = _rule(at, mask_function, attention_mask)
    if rule is None:
        if dtype != torch.bool and is_recorded:
            return eager_mask(**arguments)
        mask = sdpa_mask(**arguments, allow_is_causal_skip=allow_is_causal_skip)
        if mask is None or dtype == torch.bool:
            return mask
        return RuleMask.of(as_mask(mask), mask.shape, kv_length, dtype)
    visible = rule.visible.simplify(q_length, rule.n_keys)
    is_flag = visible == Window(None, 0) and q_length == rule.n_keys
    if (is_flag and allow_is_causal_skip) or (visible is None and allow_is_bidirectional_skip):
        return None
    return RuleMask.of(rule.visible, (batch_size, 1, q_length, kv_length), rule.n_keys, dtype)


def _may_be_rule(n_entries: int, T: int, device: torch.device | str, real: Tensor | None) -> bool:
    """Whether a rule may be faster: not with few entries, nor for one query."""
    on_cpu = torch.device(device).type == "cpu"
    return T > 1 and n_entries >= FEW_ENTRIES and on_cpu and (real is None or can_read(real))


class _Rule(NamedTuple):
    visible: Mask
    n_keys: int  # keys after these are hidden from every query


def _rule(
    lengths: _Lengths, function: MaskFunction, real: Bool[Tensor, "B _"] | None
) -> _Rule | None:
    """A mask function and padding as a rule; None if no rule is equivalent."""
    parts = list(_parts(function, lengths))
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    visible, n_keys = reduce(and_, known), lengths.S
    if visible != Window(None, None) and lengths.n_keys != lengths.S:
        # Rules count queries from the last key on: the unused end of a cache must be hidden.
        if lengths.n_keys > lengths.S or Window(None, 0) not in known:
            return None
        n_keys = lengths.n_keys
    keys = None if real is None else _real_keys(real, lengths.first_key, n_keys)
    return _Rule(visible if keys is None else visible & keys, n_keys)


def _parts(
    function: MaskFunction, lengths: _Lengths, *, in_text: bool = False
) -> Iterator[Mask | None]:
    """The rules that a mask function of transformers combines, in any order; None: an unknown one.

    Args:
        in_text: Whether it reads positions within a packed text, which differ from columns by a
            constant.
    """
    functions = list(_combined(function))
    is_packed = in_text or any(_name(part) == _PACKED for part in functions)
    for part in functions:
        remapped = _variables(part).get("mask_function") if _name(part) == _REMAPPED else None
        if is_packed and remapped is not None:
            yield from _parts(remapped, lengths, in_text=True)
        else:
            yield _part(part, lengths, in_text)


def _combined(function: MaskFunction) -> Iterator[MaskFunction]:
    """The functions all of which must allow a key."""
    functions = _variables(function).get("mask_functions") if _name(function) == _ALL else None
    if functions is None:
        yield function
    else:
        for part in functions:
            yield from _combined(part)


def _part(function: MaskFunction, lengths: _Lengths, in_text: bool) -> Mask | None:
    """The rule of one function; None if it, or a variable of it, is unknown."""
    if function is masking_utils.causal_mask_function:
        return Window(None, 0)
    if function is masking_utils.bidirectional_mask_function:
        return Window(None, None)
    match _name(function), _variables(function):
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return Window(size - 1, None)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return Window(size, size)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": Tensor() as skipped}:
            # Chunks begin anew with each packed text.
            position = torch.arange(lengths.n_keys) + lengths.first_key - skipped[:, None]
            return None if in_text else documents(position // size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as ids}:
            return documents(ids)
    return None


def _name(function: MaskFunction) -> str:
    """The function of transformers that made this one; empty if it was another."""
    if getattr(function, "__module__", "") != masking_utils.__name__:
        return ""
    return function.__qualname__.split(".")[0]


def _variables(function: MaskFunction) -> dict[str, Any]:
    """The variables that a function was closed over."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    pairs = zip(names, cells, strict=True)
    return {name: cell.cell_contents for name, cell in pairs if cell != _EMPTY}


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
