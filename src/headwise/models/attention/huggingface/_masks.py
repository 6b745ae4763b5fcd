"""Masks of Hugging Face models in their cheapest form: a rule where one is equivalent."""

from collections.abc import Callable, Iterator
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from headwise._torch_private import can_read, is_traced
from headwise.masks import Mask, Window, as_mask, documents, padding
from headwise.models.attention._rule_mask import RuleMask

# A mask of fewer entries is computed faster than it is avoided.
FEW_ENTRIES = 1 << 16
MaskFunction = Callable[..., Any]
# The makers of the two functions by which transformers keeps packed texts apart.
_PACKED = ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]


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
        rule, if all parts of `mask_function` are known; else booleans.
    """
    rule = None
    if _may_be_rule(batch_size * q_length * kv_length, q_length, use_vmap, device, attention_mask):
        at = _Lengths(batch_size, q_length, kv_length, int(q_offset), kv_offset)
        rule = _rule(at, mask_function, attention_mask)
    if rule is None:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device, **more,
        )  # fmt: skip
    visible = rule.visible.simplify(q_length, rule.n_keys)
    is_flag = visible == Window(None, 0) and q_length == rule.n_keys
    if (is_flag and allow_is_causal_skip) or (visible is None and allow_is_bidirectional_skip):
        return None
    return RuleMask.of(rule.visible, (batch_size, 1, q_length, kv_length), rule.n_keys)


def _may_be_rule(
    n_entries: int, T: int, use_vmap: bool, device: torch.device | str, real: Tensor | None
) -> bool:
    """Whether a rule may be faster: not with few entries or one query, nor while being traced."""
    if torch.compiler.is_compiling() or is_traced() or use_vmap:
        return False
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


def _parts(function: MaskFunction, lengths: _Lengths) -> Iterator[Mask | None]:
    """The rules that a mask function of transformers combines; None for an unknown one."""
    name, known = _name(function), _variables(function)
    if function is masking_utils.causal_mask_function:
        yield Window(None, 0)
    elif function is masking_utils.bidirectional_mask_function:
        yield Window(None, None)
    elif name == "sliding_window_overlay":
        yield Window(known["sliding_window"] - 1, None)
    elif name == "sliding_window_bidirectional_overlay":
        yield Window(known["sliding_window"], known["sliding_window"])
    elif name == "chunked_overlay":
        position = torch.arange(lengths.n_keys) + lengths.first_key - known["left_padding"][:, None]
        yield documents(position // known["chunk_size"])
    elif name == "and_masks":
        yield from _all_parts(known["mask_functions"], lengths)
    else:
        yield None


def _all_parts(functions: tuple[MaskFunction, ...], lengths: _Lengths) -> Iterator[Mask | None]:
    if [_name(function) for function in functions] == _PACKED:
        # Within a packed text, positions and columns differ by a constant.
        ids, remapped = (_variables(function) for function in functions)
        yield documents(ids["packed_sequence_mask"])
        functions = (remapped["mask_function"],)
    for function in functions:
        yield from _parts(function, lengths)


def _name(function: MaskFunction) -> str:
    """The function of transformers that made this one; empty if it was another."""
    if getattr(function, "__module__", "") != masking_utils.__name__:
        return ""
    return function.__qualname__.split(".")[0]


def _variables(function: MaskFunction) -> dict[str, Any]:
    """The variables that a function was closed over."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


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
