"""Which keys a mask hides from a softmax, told from how the mask came into its logits.

Logits alone cannot say it: a saturated head gives a key a logit as low as a mask does. So scores
are followed until their softmax, and what is added to them or filled into them tells: the lowest
number of a dtype, -1e9, -10,000 and the like, set apart from every real bias.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise._torch_private import without_function_modes
from headwise.models.capture._matmul import is_product

# What hides a key is at least so low.
_LOW = -1000.0
# The values of a mask lie between the lowest and a part of it, all others much nearer to zero.
_NEAR_LOWEST, _NEAR_ZERO = 1 / 4, 1 / 20
# The exponential of anything lower is 0 in float32.
_UNDERFLOW = -104.0
# How many tensors are followed at a time.
_FOLLOWED = 16

_ADD = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_SUBTRACT = {"sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__", "rsub", "__rsub__"}
_FILL = {"masked_fill", "masked_fill_"}
_MOVE = {
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT", "T",
    "__getitem__", "expand", "repeat", "cat", "concat", "concatenate", "flip", "roll",
    "gather", "index_select", "take_along_dim",
}  # fmt: skip

Hidden = Bool[Tensor, "..."]
FunctionCall = tuple[
    str, tuple[Any, ...], dict[str, Any]
]  # the name of a function, and its arguments


class Masks:
    """Follows scores, and the masks that are made for them, until they meet a softmax."""

    def __init__(self) -> None:
        # Tensors that are followed, and what is hidden of each; None: nothing.
        self._followed: list[tuple[weakref.ref[Tensor], Hidden | None]] = []

    def forget(self) -> None:
        """The pass is over."""
        self._followed = []

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, answer: Any) -> None:
        """Take in one call of a function of torch."""
        name = _name(func)
        into = args[0] if name == "__setitem__" else answer
        if not isinstance(into, Tensor) or not into.is_floating_point() or into.ndim < 2:
            return
        product = is_product(func) or name == "baddbmm"
        known = {} if product else self._known(args)
        fills = name in _FILL or name in ("where", "__setitem__")
        if name.endswith("_like") or not (known or product or fills):
            return
        with torch.no_grad(), without_function_modes():
            hidden = _masked((name, args, kwargs), into, set(known))
            kept, handed_on = _handed_on(func, (name, args, kwargs), into, known)
            if product or kept or hidden is not None:
                self._enter(into, _either(hidden, handed_on), name)

    def hidden_of(self, logits: Tensor) -> Hidden | None:
        """What is hidden of the logits of a softmax; None where they were not followed to it."""
        for ref, hidden in self._followed:
            if ref() is logits:
                return torch.zeros_like(logits, dtype=torch.bool) if hidden is None else hidden
        return None

    def _known(self, args: Any) -> dict[int, Hidden | None]:
        """What is hidden of those arguments that are followed, by their identity."""
        if not self._followed:
            return {}
        given = {id(x) for x in _tensors(args)}
        alive = [(ref(), hidden) for ref, hidden in self._followed]
        return {id(x): hidden for x, hidden in alive if x is not None and id(x) in given}

    def _enter(self, x: Tensor, hidden: Hidden | None, name: str) -> None:
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        followed: list[tuple[weakref.ref[Tensor], Hidden | None]] = []
        for ref, before in self._followed:
            other = ref()
            if other is None or other is x:
                continue
            if in_place and hidden is not None and _is_same_memory(other, x):
                before = hidden.reshape(other.shape)
            followed.append((ref, before))
        self._followed = [*followed[1 - _FOLLOWED :], (weakref.ref(x), hidden)]


def visible_keys(
    logits: Float[Tensor, "B H T S"], hidden: Bool[Tensor, "B H T S"] | None, dtype: torch.dtype
) -> Bool[Tensor, "B H T S"]:
    """Which keys each query may attend to; none of them where all are hidden.

    A key that is hidden and has a weight nevertheless, beside logits as low as its mask, is
    attended to.

    Args:
        hidden: What masks hide; None where that is unknown, and the logits themselves must say it.
        dtype: That of the model's logits.
    """
    marked = _hidden_unseen(logits, dtype) if hidden is None else hidden
    marked = marked | logits.isneginf()
    empty = marked.all(-1, keepdim=True)
    weighty = logits - logits.amax(-1, keepdim=True) > _UNDERFLOW
    return ~empty & (~marked | weighty)


def _hidden_unseen(logits: Float[Tensor, "B H T S"], dtype: torch.dtype) -> Hidden:
    """What seems to be hidden in each head, where no mask was seen; never all that it has."""
    marked = _set_apart(logits, dtype, (-2, -1))
    return marked & ~marked.all(-1, keepdim=True).all(-2, keepdim=True)


def _name(func: Callable[..., Any]) -> str:
    if func == Tensor.mT.__get__ or func == Tensor.T.__get__:  # type: ignore[attr-defined]
        return "mT"
    return getattr(func, "__name__", "")


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (x for x in arg if isinstance(x, Tensor))


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    whole = one.is_contiguous() and other.is_contiguous() and one.numel() == other.numel()
    return whole and one.data_ptr() == other.data_ptr()


def _either(one: Hidden | None, other: Hidden | None) -> Hidden | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other


def _handed_on(
    func: Callable[..., Any], call: FunctionCall, into: Tensor, known: dict[int, Hidden | None]
) -> tuple[bool, Hidden | None]:
    """Whether the answer is made of what is followed, and what is hidden of it for that."""
    name, args, kwargs = call
    if name in _MOVE:
        if all(hidden is None for hidden in known.values()):
            return bool(known), None
        return True, func(*_as_hidden(args, known), **kwargs)
    kept, hidden = False, None
    for x in _tensors(args):
        if id(x) in known and (x.numel() == into.numel() or _fits(x.shape, into.shape)):
            before, kept = known[id(x)], True
            if before is not None:
                same = x.numel() == into.numel()
                before = before.reshape(into.shape) if same else before.expand(into.shape)
                hidden = _either(hidden, before)
    return kept, hidden


def _as_hidden(args: Any, known: dict[int, Hidden | None]) -> list[Any]:
    """Arguments with what is hidden in the place of what it is hidden of."""

    def turned(x: Any) -> Any:
        if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
            return type(x)(turned(part) for part in x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        hidden = known.get(id(x))
        return torch.zeros_like(x, dtype=torch.bool) if hidden is None else hidden

    return [turned(x) for x in args]


def _fits(shape: torch.Size, wide: torch.Size) -> bool:
    if len(shape) > len(wide):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))


def _masked(call: FunctionCall, into: Tensor, known: set[int]) -> Hidden | None:
    """What a call hides of its answer by itself."""
    name, args, kwargs = call
    if name in _FILL:
        given = dict(zip(("mask", "value"), args[1:], strict=False)) | kwargs
        where, value = given["mask"], given["value"]
        return where.expand(into.shape) if _is_low(value) else None
    if name == "where" and len(args) == 3:
        return _chosen(*args, into.shape, known)
    if name == "__setitem__":
        if not _is_low(args[2]):
            return None
        hidden = torch.zeros_like(into, dtype=torch.bool)
        hidden[args[1]] = True
        return hidden
    if name == "baddbmm":
        return _hidden_by(args[0], 1, into.shape)
    added = name in _ADD
    if added or name in _SUBTRACT:
        sign = 1 if added else -1
        masks = [_hidden_by(x, sign, into.shape) for x in _tensors(args) if id(x) not in known]
        return next(iter(masks), None)
    return None


def _is_low(value: Any) -> bool:
    single = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return single and float(value) <= _LOW


def _chosen(
    where: Tensor, one: Any, other: Any, shape: torch.Size, known: set[int]
) -> Hidden | None:
    """Where a low value is taken from that of two which is not followed."""
    hidden = None
    for taken, x in ((where, one), (~where, other)):
        if id(x) in known:
            continue
        low = taken if _is_low(x) else None
        if low is None and isinstance(x, Tensor):
            values = _hidden_by(x, 1, shape)
            low = None if values is None else taken & values
        hidden = _either(hidden, None if low is None else low.expand(shape))
    return hidden


def _hidden_by(x: Tensor, sign: int, shape: torch.Size) -> Hidden | None:
    """What is hidden where these values are added; a number for a whole row only shifts it."""
    if not x.is_floating_point() or not x.ndim or x.shape[-1] == 1 or not _fits(x.shape, shape):
        return None
    return _set_apart(sign * x, x.dtype, tuple(range(-x.ndim, 0))).expand(shape)


def _set_apart(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Hidden:
    """Where values are so low, and so far from all others along some axes, that they are a mask.

    Two kinds of masks may have been put together, and some of them more than once.
    """
    hidden = x <= torch.finfo(dtype).min / 2
    for _ in range(2):
        left = x.masked_fill(hidden, 0.0)
        lowest = left.amin(dims, keepdim=True)
        low = left <= lowest * _NEAR_LOWEST
        others = left.masked_fill(low, 0.0).abs().amax(dims, keepdim=True)
        is_mask = (lowest <= _LOW) & (others <= -lowest * _NEAR_ZERO)
        hidden = hidden | (low & is_mask)
    return hidden
