"""A mask that is a rule for attention, and a tensor for whatever else reads it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise._torch_private import map_leaves, without_tensor_subclasses
from headwise.masks import Mask

# What transformers calls our attention implementation.
NAME = "headwise"


class RuleMask(Tensor):
    """A mask `[B, 1, T, S]` whose entries are computed when they are first read.

    They are booleans, True = may attend, as under `sdpa`, or floats to add to the logits, as under
    `eager`. The kernel reads the rule instead. Models that slice, combine or change their mask get,
    and change, a tensor: from then on that tensor is the mask.

    Attributes:
        rule: Which of the first `n_keys` keys each query may attend to.
        n_keys: Keys after these are hidden from every query.
    """

    rule: Mask
    n_keys: int
    _entries: Tensor | None

    @classmethod
    def of(
        cls,
        rule: Mask,
        shape: tuple[int, int, int, int],
        n_keys: int,
        dtype: torch.dtype = torch.bool,
    ) -> "RuleMask":
        """A mask of this shape that takes no memory."""
        mask = torch.zeros((), dtype=dtype).expand(shape).as_subclass(cls)
        mask.rule, mask.n_keys, mask._entries = rule, n_keys, None
        return mask

    def visible(self) -> Tensor:
        """Which keys each query may attend to, as booleans."""
        with without_tensor_subclasses():
            B, _, T, S = self.shape
        visible = self.rule.dense(T, self.n_keys).expand(B, 1, T, self.n_keys)
        return pad(visible, (0, S - self.n_keys)) if self.n_keys < S else visible

    def entries(self) -> Tensor:
        """The mask as a plain tensor, the same one at every call."""
        if self._entries is None:
            self._entries = self.visible()
            if self.dtype != torch.bool:
                lowest = torch.finfo(self.dtype).min
                self._entries = torch.zeros((), dtype=self.dtype).where(self._entries, lowest)
        return self._entries

    def latest(self) -> Tensor:
        """The rule, or the entries once they have been read: they may have been changed."""
        return self if self._entries is None else self._entries

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DESCRIPTIONS:
            with without_tensor_subclasses():
                return func(*args, **kwargs)
        # Whatever computes with the mask gets the tensor that it stands for.
        args, kwargs = map_leaves(
            lambda x: x.entries() if isinstance(x, RuleMask) else x, (args, kwargs)
        )
        return func(*args, **kwargs)


# Properties that are read without computing the entries; compilers read all of them.
_PROPERTIES = (
    "_base", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
    "is_mkldnn", "is_nested", "is_quantized", "is_sparse", "layout", "ndim", "requires_grad",
    "shape",
)  # fmt: skip
DESCRIPTIONS = {
    Tensor.__len__, Tensor.dim, Tensor.is_complex, Tensor.is_conj, Tensor.is_floating_point,
    Tensor.is_inference, Tensor.is_neg, Tensor.numel, Tensor.size, Tensor.storage_offset,
    Tensor.stride, *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
}  # fmt: skip
