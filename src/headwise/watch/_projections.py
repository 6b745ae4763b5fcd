"""The output projection of each watched attention, and the gate before it, found by its input."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._torch_private import without_function_modes
from headwise.capture import AttentionCall, Site
from headwise.models import Hooks
from headwise.ownership import OutputProjection, is_whole_linear

Gate = Float[Tensor, "B H T"]
# Continues with the output projection and the gate of each head, where there are any.
Resume = Callable[[OutputProjection | None, Gate | None], object]
# The share of numbers that keep their sign on the way: a norm that subtracts a mean turns a few.
_ALIKE = 0.9


class Projections:
    """Finds the output projections of a watched model: each is the first linear layer after the
    attention whose input is the heads side by side, or the heads times positive factors.

    Attributes:
        found: The projections, by site.
    """

    def __init__(self, model: nn.Module, needs_gates: bool) -> None:
        self._model, self._needs_gates = model, needs_gates
        self.found: dict[Site, OutputProjection] = {}
        self._waiting: tuple[Site, Float[Tensor, "B T H Dv"], Resume] | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Compare the inputs of linear layers with heads while the block runs."""
        tuners = [x for x in self._model.modules() if hasattr(x, "base_layer")]
        adapted = {module for tuner in tuners for module in tuner.modules()}
        with Hooks() as hooks:
            for name, module in self._model.named_modules():
                if hasattr(module, "weight") and module not in adapted:
                    # Before all other hooks, which may edit the heads.
                    hooks.before(module, partial(self._note, name), prepend=True)
            yield

    def is_known(self, site: Site) -> bool:
        """Whether the calls of a site need not wait."""
        return site in self.found and not self._needs_gates

    def wait(self, site: Site, call: AttentionCall, resume: Resume) -> None:
        """Resume once a linear layer receives the heads of a call."""
        self.flush()
        if isinstance(call.module, nn.MultiheadAttention):  # which never calls its projection
            name = f"{site.name}.out_proj".removeprefix(".")
            self.found[site] = OutputProjection(name, call.module.out_proj, site.n_heads)
            resume(self.found[site], None)
        else:
            self._waiting = site, call.heads.transpose(1, 2), resume

    def flush(self) -> None:
        """Resume without a projection, if a call still waits for one."""
        if self._waiting is not None:
            (*_, resume), self._waiting = self._waiting, None
            with without_function_modes():
                resume(None, None)

    def forget(self) -> None:
        """The pass whose call waits has failed."""
        self._waiting = None

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._waiting is None or not args or not isinstance(args[0], Tensor):
            return
        (site, heads, resume), x = self._waiting, args[0]
        projection = OutputProjection(name, module, site.n_heads)
        width, is_split = x.shape[-1] * projection.n_groups, heads.shape[2] == site.n_heads
        fits = is_split and x.numel() == heads.numel() and width == heads[0, 0].numel()
        if not fits or not is_whole_linear(module):
            return
        B, T, H, Dv = heads.shape
        with without_function_modes(), torch.no_grad():
            # Some models put positions before texts.
            for received in (x.reshape(B, T, H, Dv), x.reshape(T, B, H, Dv).transpose(0, 1)):
                if _is_alike(heads, received):
                    self.found[site], self._waiting = projection, None
                    resume(projection, _gate(heads, received) if self._needs_gates else None)
                    return


def _is_alike(heads: Float[Tensor, "B T H Dv"], received: Float[Tensor, "B T H Dv"]) -> bool:
    """Whether numbers keep their sign on the way from the heads; those that become zero may."""
    if torch.equal(heads, received):  # as in most models, and zeros
        return True
    products = heads.sign() * received.sign()
    n_same, n_other = (products > 0).sum(), (products < 0).sum()
    return bool(n_same > 0 and n_same >= _ALIKE * (n_same + n_other))


def _gate(heads: Float[Tensor, "B T H Dv"], received: Float[Tensor, "B T H Dv"]) -> Gate | None:
    """The mean factor between each head and what the projection receives, if all are from 0 to 1
    and they differ from 1; NaN for heads that are zero."""
    dtype = torch.promote_types(heads.dtype, torch.float32)
    factors = received.to(dtype) / heads.to(dtype)
    known = factors[heads != 0]
    if not ((known >= 0) & (known <= 1)).all() or (known == 1).all():
        return None
    return factors.where(heads != 0, torch.nan).nanmean(-1).transpose(1, 2)
