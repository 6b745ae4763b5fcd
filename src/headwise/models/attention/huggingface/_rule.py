"""How each implementation of the attention interface interprets its arguments, as a rule."""

from functools import reduce
from operator import and_
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise._torch_private import can_read, is_traced, needs_gradient
from headwise.errors import MaskError, UnsupportedError
from headwise.kernels import AttentionRule, Bias, TensorBias, make_rule
from headwise.masks import Mask, as_mask, causal, documents, from_flex, window
from headwise.masks.parts import top_left
from headwise.models.attention._rule_mask import NAME, RuleMask, unless_read
from headwise.models.attention.huggingface._transformers import is_flash, is_written_for_eager

_FLEX, _CAUSAL = "flex_attention", causal()
_NOT_OF_SDPA = ("softcap", "s_aux", "sinks")


def is_causal(module: nn.Module, T: int, kwargs: dict[str, Any], implementation: str) -> bool:
    """Whether a call without a mask is causal: by its argument, else by its module's attribute.

    Under `eager` it is not, nor under our name where a module was written for `eager`.
    """
    if T <= 1:
        return False
    if implementation == NAME:
        config = getattr(module, "config", None)
        if is_written_for_eager(type(module) if config is None else type(config)):
            return False
    argument = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if argument is None else argument
    return bool(causal)


def keys_read(
    module: nn.Module, T: int, S: int, mask: Any, implementation: str, kwargs: dict[str, Any]
) -> int:
    """The number of keys that are read: some kernels skip the unused end of a static cache."""
    mask = unless_read(mask)
    if isinstance(mask, RuleMask):
        return mask.n_keys
    if implementation == NAME and mask is None and is_causal(module, T, kwargs, implementation):
        return min(S, T)
    return min(S, mask.shape[1]) if mask is not None and is_flash(implementation) else S


def rule_of(
    module: nn.Module,
    implementation: str,
    q: Tensor,
    k: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
    n_keys: int | None = None,
) -> AttentionRule:
    """The rule by which the implementation computes weights from these arguments.

    Args:
        n_keys: What `keys_read` says, if it is known.
    Raises:
        UnsupportedError: `sdpa` leaves an argument out, or the mask cannot be read.
    """
    if implementation == "sdpa":
        for name in _NOT_OF_SDPA:
            if kwargs.get(name) is not None:
                raise UnsupportedError(
                    f"observe: {type(module).__name__} passes {name}, which 'sdpa' leaves out. "
                    f"Load the model with attn_implementation='eager' or 'headwise'."
                )
    S = n_keys
    if S is None:
        S = keys_read(module, q.shape[2], k.shape[2], mask, implementation, kwargs)
    visible = _visible(module, implementation, q, S, unless_read(mask), kwargs)
    return make_rule(
        head_dim=q.shape[-1],
        mask=_selected(visible, kwargs.get("indices"), k.shape[2], S),
        scale=kwargs.get("scaling"),
        bias=_bias(kwargs.get("position_bias"), q, S, implementation),
        softcap=kwargs.get("softcap"),
        sinks=_sinks(kwargs),
        is_added=True,
    )


def _sinks(kwargs: dict[str, Any]) -> Float[Tensor, " H"] | Float[Tensor, "B H T"] | None:
    """One more logit in the denominator, of each head or of each query of it."""
    sinks = kwargs.get("sinks")
    return kwargs.get("s_aux") if sinks is None else sinks.squeeze(-1)


def _selected(
    visible: Mask | Tensor | None, indices: Int[Tensor, "B T _"] | None, S: int, n_keys: int
) -> Mask | Tensor | None:
    """What is left to see where a sparse layer has selected keys, of the first `n_keys` of `S`.

    Such layers put their selection into the mask for `eager` and `sdpa` alone.
    """
    if indices is None:
        return visible
    selected = indices.new_zeros(*indices.shape[:2], S, dtype=torch.bool)
    selected = selected.scatter_(-1, indices.long(), True)[:, None, :, :n_keys]
    if isinstance(visible, Tensor) and visible.is_floating_point():
        return visible.masked_fill(~selected, -torch.inf)
    if isinstance(visible, Tensor):
        return visible & selected
    return as_mask(selected) if visible is None else visible & as_mask(selected)


def _visible(
    module: nn.Module, implementation: str, q: Tensor, S: int, mask: Any, kwargs: dict[str, Any]
) -> Tensor | Mask | None:
    is_plain = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
    if is_plain and implementation != NAME and is_flash(implementation):
        return _flash_mask(module, q, S, mask, implementation, kwargs)
    if isinstance(mask, RuleMask):
        return mask.rule
    if isinstance(mask, Tensor) and (mask.ndim == 4 or implementation == NAME):
        return mask[..., :S]
    if mask is None:
        # Without a mask, sdpa uses its kernel's causal flag; other kernels see every key.
        if implementation in ("eager", _FLEX) or not is_causal(
            module, q.shape[2], kwargs, implementation
        ):
            return None
        return _CAUSAL if q.shape[2] == S else top_left(q.shape[2], S, q.device)
    try:
        return from_flex(mask)
    except MaskError:
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"observe: {type(module).__name__} under {implementation!r} has a mask {kind} that "
            f"cannot be read. Load the model with attn_implementation='sdpa'."
        ) from None


def _flash_mask(
    module: nn.Module,
    q: Tensor,
    S: int,
    real: Tensor | None,
    implementation: str,
    kwargs: dict[str, Any],
) -> Mask | None:
    """The mask of a flash kernel, from its causal flag, window, padding and packed texts."""
    masks: list[Mask] = []
    if is_causal(module, q.shape[2], kwargs, implementation):
        masks.append(causal())
    size = kwargs.get("sliding_window")
    if size is not None and size < S:
        masks.append(window(size - 1))
    if real is not None:
        masks.append(as_mask(real.bool()[:, None, None, :], "observe"))
    else:
        ids = _packed(q, S, kwargs)
        masks += [] if ids is None else [documents(ids)]
    return reduce(and_, masks) if masks else None


def _packed(q: Tensor, S: int, kwargs: dict[str, Any]) -> Int[Tensor, "1 S"] | None:
    """The number of each key's text in a packed row, from cumulative lengths or positions."""
    ends, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    index = torch.arange(S, device=q.device)
    if ends is not None:
        return torch.bucketize(index, ends.to(index), right=True)[None]
    if q.shape[0] != 1 or positions is None or positions.shape != (1, S) or S == 1:
        return None
    if torch.equal(positions[0] - positions.min(), index):
        return None
    return (positions == positions.min()).cumsum(-1)


def _bias(
    position_bias: Tensor | None, q: Tensor, S: int, implementation: str
) -> Bias | Tensor | None:
    """A bias by position, unless it adds nothing, as in T5's cross-attention."""
    if position_bias is None or _holds_zeros(position_bias):
        return None
    bias = position_bias[..., :S].to(torch.promote_types(q.dtype, torch.float32))
    # Under our name masks are apart, so that nothing in it hides a key, which takes time to see.
    return TensorBias(bias) if implementation == NAME else bias


def _holds_zeros(bias: Tensor) -> bool:
    """Whether a bias is known to hold zeros alone."""
    if not bias.numel() or not can_read(bias) or is_traced() or needs_gradient(bias):
        return False
    # Its first entry tells nearly always, and takes no time to read.
    return bias[(0,) * bias.ndim].item() == 0 and not bool(bias.any())
