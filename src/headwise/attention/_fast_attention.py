"""Models that call torch's fused attention, on our kernels while a block runs."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from headwise._torch_private import has_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import Bias, TensorBias, attend, autocast_inputs, native_is_faster
from headwise.masks import Mask, as_mask
from headwise.masks.parts import top_left
from headwise.models import Hooks, SharedSetting, ordinary_path

_TORCHS = F.scaled_dot_product_attention


@contextmanager
def fast_attention(model: nn.Module) -> Iterator[None]:
    """Run the attention of models that call `scaled_dot_product_attention` on our kernels.

    For models outside the attention interface of transformers: Falcon, timm, diffusers, torch's
    own layers, or your own. While the block runs, calls of that function in a forward pass of
    `model` go to `attend` where it is faster. Dropout, other devices, compiled code and other
    models stay with torch. Modules are left as they were, also after an exception.

    Args:
        model: Any module.
    Raises:
        UnsupportedError: the model ran and never called the function.
    """
    use = _Use()
    with Hooks(compiled=True) as hooks, ordinary_path(model):
        # Wherever modules of the model look torch's function up.
        for place in list(_places(model)):
            hooks.enter_context(_replacement(*place).changed())
        for module in model.modules():
            # Every module around a call: layers are called alone when they are recomputed.
            if module is model or next(module.children(), None) is not None:
                hooks.before(module, use.enter)
                hooks.after(module, use.leave, always_call=True)
        hooks.callback(use.forget)
        yield
    if use.ran and not use.calls:
        raise UnsupportedError(
            f"fast_attention: {type(model).__name__} ran and never called "
            f"scaled_dot_product_attention. For models of transformers see register_attention(); "
            f"other models compute attention in their own way."
        )


class _Running(threading.local):
    """The models with fast attention that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.uses: list[_Use] = []


@dataclass(eq=False)
class _Use:
    """One block of one model."""

    ran: bool = False
    calls: int = 0

    def enter(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.ran = True
            _running.uses.append(self)

    def leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self in _running.uses:
            del _running.uses[-1 - _running.uses[::-1].index(self)]  # its innermost call

    def forget(self) -> None:
        """End calls that an interrupt has left open."""
        _running.uses[:] = [use for use in _running.uses if use is not self]


_running = _Running()
_settings: dict[tuple[str, str], SharedSetting] = {}


def _replacement(module: str, name: str) -> SharedSetting:
    """The setting that is torch's function under a name in a Python module, replaced by ours."""
    if (module, name) not in _settings:
        functions = vars(sys.modules[module])
        _settings[module, name] = SharedSetting(
            lambda: _TORCHS, partial(functions.__setitem__, name), scaled_dot_product_attention
        )
    return _settings[module, name]


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The Python modules that hold the function, and its name there."""
    names = {type(module).__module__ for module in model.modules()}
    for module in sorted({F.__name__, *names} & sys.modules.keys()):
        for name, value in vars(sys.modules[module]).items():
            if value is _TORCHS or value is scaled_dot_product_attention:
                yield module, name


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's function, computed by `attend` where that is faster and the model asked for it."""
    inputs = (query, key, value)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    leave_to_torch = partial(_TORCHS, *inputs, attn_mask, dropout_p, is_causal, **how)
    if torch.compiler.is_compiling() or not _running.uses:
        return leave_to_torch()
    if has_function_modes() or has_torch_function(inputs):
        # As torch's own function does: function modes and tensor subclasses come first.
        function, more = scaled_dot_product_attention, (attn_mask, dropout_p, is_causal)
        return handle_torch_function(function, inputs, *inputs, *more, **how)
    _running.uses[-1].calls += 1
    # Whether a mask and the causal flag may be combined is for torch to say.
    is_for_torch = dropout_p or (is_causal and attn_mask is not None)
    if is_for_torch or not _is_faster(*inputs, attn_mask, enable_gqa):
        return leave_to_torch()
    mask, bias = _visible(attn_mask, is_causal, query.shape[2], key.shape[2])
    heads: Any = attend(*autocast_inputs(*inputs), mask=mask, bias=bias, scale=scale)
    return heads


def _is_faster(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether `attend` takes such a call, and the kernel is faster."""
    if not (q.is_cpu and q.ndim == k.ndim == v.ndim == 4):
        return False
    if not native_is_faster(q, k, mask is not None):
        return False
    has_heads = k.shape[1] in (1, q.shape[1]) or (enable_gqa and q.shape[1] % k.shape[1] == 0)
    fits = q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and has_heads
    return fits and q.dtype == k.dtype == v.dtype and (mask is None or 2 <= mask.ndim <= 4)


def _visible(
    mask: Tensor | None, is_causal: bool, T: int, S: int
) -> tuple[Mask | None, Bias | None]:
    """A mask of torch's function, or its causal flag, as a mask and a bias of ours."""
    if mask is not None:
        four = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        return (as_mask(four), None) if mask.dtype == torch.bool else (None, TensorBias(four))
    return (top_left(T, S) if is_causal else None), None
