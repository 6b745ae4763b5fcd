"""Masks from tensors of any of the usual kinds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from headwise._display import type_of
from headwise._torch_private import can_read, has_readable_values
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.masks._mask import Mask, a_tensor
from headwise.masks.tiles import Tile, cut

# The lowest bias: kernels take logits below -1e30 as masked, and a row of a float mask whose
# entries are all finite masks nothing.
LOWEST = -1e29


@dataclass(frozen=True)
class Dense(Mask):
    """A boolean tensor; axes of length 1 broadcast."""

    visible: Bool[Tensor, "#B #H #T #S"]

    def tile(self, tile: Tile) -> Bool[Tensor, "#B #H #R #n"]:
        return cut(self.visible, tile)

    @property
    def batch(self) -> tuple[int, int]:
        return self.visible.shape[0], self.visible.shape[1]


def from_blocked(blocked: Bool[Tensor, "*shape"]) -> Mask:
    """Read a mask of the other polarity (True = blocked, as in `nn.MultiheadAttention`).

    Raises:
        MaskError: the mask is not boolean.
        ShapeError: it is neither `[T, S]` nor `[B, H, T, S]`.
    """
    _check_tensor(blocked, "from_blocked", "booleans, True where a key is blocked")
    if blocked.dtype != torch.bool:
        raise MaskError(
            f"from_blocked: dtype {blocked.dtype}. Give booleans, True where a key is blocked."
        )
    return Dense(_four(~blocked, "from_blocked"))


def from_additive(additive: Float[Tensor, "*shape"]) -> Mask:
    """Read a mask of zeros and minus infinities, as is added to logits.

    The most negative number of the dtype counts as minus infinity (Hugging Face writes it).

    Raises:
        MaskError: the mask is not of floats, or has other entries: those are a bias.
        ShapeError: it is neither `[T, S]` nor `[B, H, T, S]`.
    """
    visible, bias = _parts(_checked(additive, "from_additive"))
    _check_not_binary(additive, "from_additive")
    if bool(bias.any()):
        raise MaskError(
            f"from_additive: entries between {bias.min().item():g} and {bias.max().item():g} "
            f"are a bias, not a mask. Give masks.from_blocked(mask < 0) if they block keys, as "
            f"-1e9 does in textbooks, or attend(bias=mask) to add them."
        )
    return Dense(visible)


def from_binary(binary: Shaped[Tensor, "*shape"]) -> Mask:
    """Read a mask of zeros and ones, 1 = may attend, of any dtype.

    Raises:
        MaskError: it is not a tensor, or has other entries.
        ShapeError: it is neither `[T, S]` nor `[B, H, T, S]`.
    """
    _check_tensor(binary, "from_binary", "zeros and ones, 1 where a query may attend")
    visible = binary.bool()
    if has_readable_values(binary) and bool((others := binary != visible).any()):
        value = binary[others][0].item()
        raise MaskError(
            f"from_binary: the mask holds {value:g}. Give zeros and ones, 1 where a query may "
            f"attend; numbers to be added to the logits are attend(bias=...)."
        )
    return Dense(_four(visible, "from_binary"))


def _check_tensor(mask: object, where: str, content: str) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(
            f"{where}: a mask of type {type(mask).__name__}. Give {a_tensor(mask)} of {content}."
        )


def _check_not_binary(mask: Tensor, where: str) -> None:
    """Refuse a float mask that holds zeros and ones alone: added to logits it hides nothing.

    It passes where its values cannot be read: while being traced, on the meta device, in `vmap`.
    """
    if not mask.numel() or not has_readable_values(mask):
        return
    values = mask.detach()
    if values.amax() != 1 or values.amin() != 0 or not ((values == 0) | (values == 1)).all():
        return
    raise MaskError(
        f"{where}: a {mask.dtype} mask of shape {tuple(mask.shape)} that holds only 0 and 1. "
        f"Floats are added to the logits, so it would hide nothing. Give mask.bool() or "
        f"masks.from_binary(mask) if 1 means may attend, or bias=mask to add these numbers."
    )


def from_flex(block_mask: Any) -> Mask:
    """Read a `BlockMask` of `torch.nn.attention.flex_attention`: its rule, evaluated tile by tile.

    Raises:
        MaskError: it is something else.
    """
    from torch.nn.attention.flex_attention import BlockMask  # slow to import

    if not isinstance(block_mask, BlockMask):
        raise MaskError(f"from_flex: {type_of(block_mask)}. Give what create_block_mask returns.")
    texts, heads, *_ = block_mask.shape
    return _Flex(block_mask.mask_mod, (texts, heads))


@dataclass(frozen=True)
class _Flex(Mask):
    """A mask function of flex attention, which counts queries from the first one."""

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    made_for: tuple[int, int]

    @property
    def batch(self) -> tuple[int, int]:
        return self.made_for

    def tile(self, tile: Tile) -> Bool[Tensor, "B H R n"]:
        from torch.nn.attention.flex_attention import create_mask

        first, start = tile.rows.start, tile.keys.start
        shape = (*self.made_for, tile.rows.stop - first, tile.keys.stop - start)
        if 0 in shape:
            return torch.ones(shape, dtype=torch.bool, device=tile.device)
        return create_mask(
            lambda b, h, q, k: self.rule(b, h, q + first, k + start), *shape, device=tile.device
        )


def as_mask(visible: Bool[Tensor, "*shape"], where: str = "mask") -> Mask:
    """Read booleans, True = may attend: `[T, S]`, or `[B, H, T, S]` with ones to broadcast."""
    _check_tensor(visible, where, "booleans, True where a query may attend")
    return Dense(_four(visible, where))


def split_additive(
    additive: Float[Tensor, "*shape"], where: str, *, allow_binary: bool = False
) -> tuple[Mask | None, Float[Tensor, "#B #H T S"] | None]:
    """Split an additive mask into a boolean mask and the finite bias that remains.

    Either is None where its values show that it has no effect. Where values cannot be read, both
    are returned.

    Args:
        where: The function that an error names.
        allow_binary: Whether it may hold zeros and ones alone: a bias may, a mask is more likely
            meant as 1 = may attend.
    Raises:
        ArgumentError: an entry is +inf or NaN, where values can be read.
        MaskError: it holds zeros and ones alone, and must not.
    """
    four = _checked(additive, where)
    if not allow_binary:
        _check_not_binary(additive, where)
    if not can_read(additive):
        visible, bias = _parts(four)
        return Dense(visible), bias
    lowest, highest = _range(four)
    if not highest < math.inf:
        raise ArgumentError(
            f"{where}: an additive mask or bias holds {highest}. "
            f"Give finite numbers, or -inf where a key is hidden."
        )
    if lowest > _least(four.dtype):  # nothing is hidden, so that no copy is needed
        return None, four if four.requires_grad or lowest or highest else None
    visible, bias = _parts(four)
    hides = not bool(visible.all())
    adds = bias.requires_grad or bool(bias.any())
    return Dense(visible) if hides else None, bias if adds else None


def _range(values: Tensor) -> tuple[float, float]:
    """The lowest and the highest value; NaN if one is."""
    if not values.numel():
        return 0.0, 0.0
    lowest, highest = values.detach().aminmax()
    return lowest.item(), highest.item()


def _least(dtype: torch.dtype) -> float:
    """The least bias that is added; what is below the finite numbers of the dtype is hidden."""
    return max(LOWEST, torch.finfo(dtype).min)


def _checked(additive: Tensor, where: str) -> Float[Tensor, "#B #H T S"]:
    _check_tensor(additive, where, "floats, which are added to the logits")
    if not additive.is_floating_point():
        raise MaskError(
            f"{where}: dtype {additive.dtype}. "
            f"Give booleans (True = may attend) or floats (added to the logits)."
        )
    return _four(additive, where)


def _parts(four: Tensor) -> tuple[Tensor, Tensor]:
    visible = four > torch.finfo(four.dtype).min
    return visible, four.masked_fill(~visible, 0.0).clamp(min=_least(four.dtype))


def _four(mask: Tensor, where: str) -> Tensor:
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim != 4:
        raise ShapeError(
            f"{where}: a mask of shape {tuple(mask.shape)}. "
            f"Give [T, S] or [B, H, T, S], with 1 for B or H to broadcast."
        )
    return mask
