"""Listen to attention that is plain torch: its fused function, and its own layer."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise._interrupts import deliver_interrupt, reversible
from headwise._torch_private import has_function_modes, pop_function_mode, push_function_mode
from headwise.errors import UnsupportedError
from headwise.kernels import make_rule
from headwise.masks import Mask, Window, as_mask, from_blocked
from headwise.models.capture._active_modules import ActiveModules, heads_of
from headwise.models.capture._call import AttentionCall, Hear
from headwise.models.capture._softmax import SoftmaxTracker


class _FunctionListener(TorchFunctionMode):
    """Hears `scaled_dot_product_attention` and written-out attention where a model calls them."""

    def __init__(self, hear: Hear, running: ActiveModules, softmaxes: SoftmaxTracker) -> None:
        super().__init__()
        self._hear, self._running, self._softmaxes = hear, running, softmaxes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            deliver_interrupt()  # which came while torch took this mode off or put it back
        if self._running.heard_elsewhere or not self._running.runs:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            heads = self._answered(*args, **kwargs)
            if heads is not None:
                return heads
        answer = func(*args, **kwargs)
        with torch.no_grad():
            if func is F.scaled_dot_product_attention:
                self._hear(_call(self._running, answer, *args, **kwargs))
            else:
                call = self._softmaxes.follow(func, args, kwargs, answer)
                if call is not None:
                    self._hear(call)
        return answer

    def _answered(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        running = self._running
        free = query.ndim == 4 and running.may_answer(query, key, value)
        if running.answer is None or not free:
            return None
        with torch.no_grad():
            call = _call(running, query[..., :0], query, key, value, *args, **kwargs)
            heads = running.answer(call) if call.exact else None
        return None if heads is None else heads.reshape(*query.shape[:-1], value.shape[-1])


@reversible
def capture_functions(
    hear: Hear, running: ActiveModules, softmaxes: SoftmaxTracker
) -> Iterator[None]:
    """Hear `scaled_dot_product_attention` and written-out attention of this thread.

    Watches may end in any order; a mode's own exit would take the latest one out.
    """
    listener = _FunctionListener(hear, running, softmaxes)
    push_function_mode(listener)
    try:
        yield
    finally:
        later: list[Any] = []
        # An interrupt within torch may have lost modes that it takes off for a moment.
        while has_function_modes() and (top := pop_function_mode()) is not listener:
            later.append(top)
        for mode in reversed(later):
            push_function_mode(mode)


def _call(
    running: ActiveModules,
    answer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    module = running.innermost()
    q, k, v, heads = (_four_axes(x, module) for x in (query, key, value, answer))
    T, S = q.shape[2], k.shape[2]
    mask: Tensor | Mask | None = None
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = mask.expand(1, *mask.shape) if mask.ndim == 3 else mask
    elif is_causal:  # aligned top-left, wherever the keys end
        visible = torch.ones(T, S, dtype=torch.bool, device=q.device).tril()
        mask = Window(None, 0) if T == S else as_mask(visible)
    return AttentionCall(
        module=module,
        q=q, k=k, v=v,
        rule=make_rule(head_dim=q.shape[-1], mask=mask, scale=scale, is_added=True),
        heads=heads,
        watched="the function mode",
        kernel="scaled_dot_product_attention",
        exact=not dropout_p,
        cross=running.reads_another_text(T, S),
    )  # fmt: skip


def _four_axes(x: Tensor, module: nn.Module) -> Float[Tensor, "B H T D"]:
    if x.ndim == 3:  # heads of all texts, one below the other
        heads = heads_of(module)
        heads = heads if x.shape[0] % heads == 0 else 1
        return x.detach().reshape(-1, heads, *x.shape[1:])
    if x.ndim != 4:
        raise UnsupportedError(
            f"observe: {type(module).__name__} attends with tensors of shape {tuple(x.shape)}. "
            f"Watched is attention of [batch, heads, tokens, width]."
        )
    return x.detach()


@reversible
def ordinary_path(model: nn.Module) -> Iterator[None]:
    """Keep torch's own layers out of their private fast paths, in which nothing can be heard."""
    fast = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer
    if not any(isinstance(module, fast) for module in model.modules()):
        yield
        return
    _fast_path.close()
    try:
        yield
    finally:
        _fast_path.open()


class _FastPath:
    """A setting of the whole process: as it was again when the last who closed it has opened it."""

    def __init__(self) -> None:
        self._lock, self._closed, self._was = threading.Lock(), 0, True

    def close(self) -> None:
        with self._lock:
            if self._closed == 0:
                self._was = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._closed += 1

    def open(self) -> None:
        with self._lock:
            self._closed -= 1
            if self._closed == 0:
                torch.backends.mha.set_fastpath_enabled(self._was)


_fast_path = _FastPath()


@torch.no_grad()
def tell_torch_layer(
    hear: Hear, module: nn.MultiheadAttention, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Tell `hear` of a call of torch's own layer, from what went in and what came out."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError(
            "observe: nn.MultiheadAttention with add_bias_kv or add_zero_attn attends to a key "
            "that is no token. Leave it out, or take headwise.MultiHeadAttention.from_torch."
        )
    query, key, value = (_batched(given[name], module) for name in names[:3])
    q, k, v = _projected(module, query, key, value)
    padding = given.get("key_padding_mask")
    real = None if padding is None else _real(padding)
    out = _batched(output[0], module)
    hear(
        AttentionCall(
            module=module,
            q=q, k=k, v=v,
            rule=make_rule(
                head_dim=module.head_dim, mask=_mask(given, real, q, k), is_added=True
            ),
            heads=out[:, None],
            join=partial(_join, module.out_proj),
            watched="a hook on the module",
            kernel="nn.MultiheadAttention, outside its fast path",
            exact=not (module.training and module.dropout),
            cross=given["key"] is not given["query"],
            real=real,
        )
    )  # fmt: skip


def _join(out_proj: nn.Linear, heads: Tensor) -> Float[Tensor, "B 1 T d_model"]:
    # Not called as a module: hooks of others need not see this.
    joined = heads.transpose(1, 2).flatten(2)
    return F.linear(joined, out_proj.weight, out_proj.bias)[:, None]


def _batched(x: Tensor, module: nn.MultiheadAttention) -> Float[Tensor, "B T d_model"]:
    x = x.detach()
    if x.ndim == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def _projected(
    module: nn.MultiheadAttention, *inputs: Float[Tensor, "B _ _"]
) -> list[Float[Tensor, "B H T D"]]:
    """Queries, keys and values again: the layer keeps its own to itself."""
    if module._qkv_same_embed_dim:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    return [
        F.linear(x, weight, bias).view(*x.shape[:2], module.num_heads, -1).transpose(1, 2)
        for x, weight, bias in zip(inputs, weights, biases, strict=True)
    ]


def _real(padding: Tensor) -> Bool[Tensor, "B S"]:
    """Which keys are no padding: there True means padding, or minus infinity does."""
    padding = padding if padding.ndim == 2 else padding[None]
    return ~padding if padding.dtype == torch.bool else padding > torch.finfo(padding.dtype).min


def _mask(
    given: dict[str, Any], real: Bool[Tensor, "B S"] | None, q: Tensor, k: Tensor
) -> Tensor | Mask | None:
    """Mask and padding as one: booleans of torch's layer say True where a key is blocked."""
    mask = given.get("attn_mask")
    if mask is not None and mask.ndim == 3:  # heads of all texts, one below the other
        mask = mask.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if real is None:
        if mask is None or mask.is_floating_point():
            return mask
        return from_blocked(mask)
    visible = as_mask(real[:, None, None, :])
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return from_blocked(mask) & visible
    return mask.masked_fill(~real[:, None, None, :], -torch.inf)
