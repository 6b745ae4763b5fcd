"""What the logits of a softmax are: products of queries and keys, and which keys a mask hides.

Logits alone are ambiguous: a saturated head gives a key a logit as low as a mask does. So scores
are followed to their softmax, and values that are added to them or filled into them reveal the
mask: the lowest number of a dtype, -1e9, -10,000 and the like, far below any real bias. Products
are written with `@`, `bmm` or `einsum`.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise._torch_private import without_function_modes

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
# These add a product to another tensor.
ADDED_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)
# A value that hides a key is at most this.
_LOW = -1000.0
# Values of a mask reach this share of the lowest; no other value reaches the second share.
_NEAR_LOWEST, _NEAR_ZERO = 1 / 4, 1 / 20
# The exponential of anything lower is 0 in float32.
_UNDERFLOW = -104.0
# The number of tensors that are followed at a time.
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
# A tensor that is followed, the entries that are hidden in it (None: nothing), and whether it
# follows from products of queries and keys.
Followed = tuple[weakref.ref[Tensor], Hidden | None, bool]
# The name of a function, and its arguments.
FunctionCall = tuple[str, tuple[Any, ...], dict[str, Any]]


class MaskTracker:
    """Follows scores and their masks to the softmax."""

    def __init__(self) -> None:
        self._followed: list[Followed] = []

    def clear(self) -> None:
        """End the pass."""
        self._followed = []

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        """Process one call of a torch function."""
        name = _name(func)
        if func == Tensor.where and len(args) == 3:  # a method of the values, not the condition
            args = (args[1], args[0], args[2])
        result = args[0] if name == "__setitem__" else output
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.ndim < 2:
            return
        product = is_product(func) or name == "baddbmm"
        # A linear layer makes something new, like a product.
        known = {} if product or name == "linear" else self._known(args)
        fills = name in _FILL or name in ("where", "__setitem__")
        if name.endswith("_like") or not (known or product or fills):
            return
        with torch.no_grad(), without_function_modes():
            newly_hidden = _hidden_by_call((name, args, kwargs), result, set(known))
            follows, inherited = _inherited(func, (name, args, kwargs), result, known)
            if product or follows or newly_hidden is not None:
                is_scores = product and not has_matrix(func, args)
                is_scores |= follows and self._are_scores(args)
                self._enter(result, _union(newly_hidden, inherited), name, is_scores)

    def are_scores(self, logits: Tensor) -> bool:
        """Whether the logits of a softmax follow from products of queries and keys."""
        return self._are_scores([logits])

    def _are_scores(self, args: Any) -> bool:
        arguments = {id(x) for x in _tensors(args)}
        return any(is_scores and id(ref()) in arguments for ref, _, is_scores in self._followed)

    def hidden_of(self, logits: Tensor) -> Hidden | None:
        """Which logits of a softmax are hidden; None if they were not followed to it."""
        for ref, hidden, _ in self._followed:
            if ref() is logits:
                return torch.zeros_like(logits, dtype=torch.bool) if hidden is None else hidden
        return None

    def _known(self, args: Any) -> dict[int, Hidden | None]:
        """Which entries are hidden in those arguments that are followed, by their identity."""
        if not self._followed:
            return {}
        arguments = {id(x) for x in _tensors(args)}
        alive = [(ref(), hidden) for ref, hidden, _ in self._followed]
        return {id(x): hidden for x, hidden in alive if x is not None and id(x) in arguments}

    def _enter(self, x: Tensor, hidden: Hidden | None, name: str, is_scores: bool) -> None:
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        followed: list[Followed] = []
        for ref, before, were_scores in self._followed:
            tensor = ref()
            if tensor is None or tensor is x:
                continue
            if in_place and hidden is not None and _is_same_memory(tensor, x):
                before = hidden.reshape(tensor.shape)
            followed.append((ref, before, were_scores))
        self._followed = [*followed[1 - _FOLLOWED :], (weakref.ref(x), hidden, is_scores)]


def visible_keys(
    logits: Float[Tensor, "B H T S"], hidden: Bool[Tensor, "B H T S"] | None, dtype: torch.dtype
) -> Bool[Tensor, "B H T S"]:
    """Which keys each query may attend to; none if all are hidden.

    A hidden key that has a nonzero weight, because other logits are as low as its mask, counts
    as visible.

    Args:
        hidden: What masks hide; None if that is unknown and must be inferred from the logits.
        dtype: The dtype of the model's logits.
    """
    marked = _inferred_hidden(logits, dtype) if hidden is None else hidden
    marked = marked | logits.isneginf()
    empty = marked.all(-1, keepdim=True)
    weighty = logits - logits.amax(-1, keepdim=True) > _UNDERFLOW
    return ~empty & (~marked | weighty)


def _inferred_hidden(logits: Float[Tensor, "B H T S"], dtype: torch.dtype) -> Hidden:
    """What seems to be hidden in each head if no mask was followed; never all of its keys."""
    marked = _far_below(logits, dtype, (-2, -1))
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


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    is_whole = a.is_contiguous() and b.is_contiguous() and a.numel() == b.numel()
    return is_whole and a.data_ptr() == b.data_ptr()


def _union(a: Hidden | None, b: Hidden | None) -> Hidden | None:
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _inherited(
    func: Callable[..., Any], call: FunctionCall, result: Tensor, known: dict[int, Hidden | None]
) -> tuple[bool, Hidden | None]:
    """Whether a result derives from tensors that are followed, and what it inherits as hidden."""
    name, args, kwargs = call
    if name in _MOVE:
        if all(hidden is None for hidden in known.values()):
            return bool(known), None
        return True, func(*_as_hidden(args, known), **kwargs)
    follows, hidden = False, None
    for x in _tensors(args):
        if id(x) in known and (x.numel() == result.numel() or _fits(x.shape, result.shape)):
            before, follows = known[id(x)], True
            if before is not None:
                same_size = x.numel() == result.numel()
                shape = result.shape
                before = before.reshape(shape) if same_size else before.expand(shape)
                hidden = _union(hidden, before)
    return follows, hidden


def _as_hidden(args: Any, known: dict[int, Hidden | None]) -> list[Any]:
    """The arguments with each tensor replaced by its hidden entries."""

    def replaced(x: Any) -> Any:
        if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
            return type(x)(replaced(part) for part in x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        hidden = known.get(id(x))
        return torch.zeros_like(x, dtype=torch.bool) if hidden is None else hidden

    return [replaced(x) for x in args]


def _fits(shape: torch.Size, wide: torch.Size) -> bool:
    if len(shape) > len(wide):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))


def _hidden_by_call(call: FunctionCall, result: Tensor, known: set[int]) -> Hidden | None:
    """The entries of its result that a call hides by itself."""
    name, args, kwargs = call
    if name in _FILL:
        arguments = dict(zip(("mask", "value"), args[1:], strict=False)) | kwargs
        filled, value = arguments["mask"], arguments["value"]
        return filled.expand(result.shape) if _is_low(value) else None
    if name == "where" and len(args) == 3:
        return _hidden_by_where(*args, result.shape, known)
    if name == "__setitem__":
        if not _is_low(args[2]):
            return None
        hidden = torch.zeros_like(result, dtype=torch.bool)
        hidden[args[1]] = True
        return hidden
    if name == "baddbmm":
        return _hidden_by_adding(args[0], 1, result.shape)
    if name in _ADD or name in _SUBTRACT:
        sign = 1 if name in _ADD else -1
        masks = [
            _hidden_by_adding(x, sign, result.shape) for x in _tensors(args) if id(x) not in known
        ]
        return next(iter(masks), None)
    return None


def _is_low(value: Any) -> bool:
    single = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return single and float(value) <= _LOW


def _hidden_by_where(
    condition: Tensor, if_true: Any, if_false: Any, shape: torch.Size, known: set[int]
) -> Hidden | None:
    """Where `torch.where` takes a low value from an operand that is not followed."""
    hidden = None
    for taken, x in ((condition, if_true), (~condition, if_false)):
        if id(x) in known:
            continue
        low = taken if _is_low(x) else None
        if low is None and isinstance(x, Tensor):
            values = _hidden_by_adding(x, 1, shape)
            low = None if values is None else taken & values
        hidden = _union(hidden, None if low is None else low.expand(shape))
    return hidden


def _hidden_by_adding(x: Tensor, sign: int, shape: torch.Size) -> Hidden | None:
    """What adding these values hides; one value for a whole row only shifts the row."""
    if not x.is_floating_point() or not x.ndim or x.shape[-1] == 1 or not _fits(x.shape, shape):
        return None
    return _far_below(sign * x, x.dtype, tuple(range(-x.ndim, 0))).expand(shape)


def _far_below(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Hidden:
    """Where values are so low, and so far below all others along some axes, that they are a mask.

    Two kinds of masks may have been added, and each of them more than once.
    """
    # A gap identifies a mask, since no value does: models add -1e4, -1e9 or the lowest number of a
    # dtype, and a bias such as ALiBi's reaches -1e4 on a long text. But a bias fills the range from
    # 0 to its lowest value, and a mask leaves it empty: its values are near the lowest (a quarter
    # of it, for it may be added several times), and all others near zero. What a round finds is
    # taken out, because beside -1e9 a second mask of -1e4 is near zero.
    hidden = x <= torch.finfo(dtype).min / 2
    for _ in range(2):
        remaining = x.masked_fill(hidden, 0.0)
        lowest = remaining.amin(dims, keepdim=True)
        low = remaining <= lowest * _NEAR_LOWEST
        largest = remaining.masked_fill(low, 0.0).abs().amax(dims, keepdim=True)
        is_mask = (lowest <= _LOW) & (largest <= -lowest * _NEAR_ZERO)
        hidden = hidden | (low & is_mask)
    return hidden


@dataclass(frozen=True)
class Product:
    """Weights times values: a sum over the last axis of weights and the `S` axis of values."""

    weights: Float[Tensor, "*lead T S"]
    values: Float[Tensor, "*shared S Dv"]
    heads: Float[Tensor, "*lead T Dv"]


def is_product(func: Callable[..., Any]) -> bool:
    """Whether a torch function computes a matrix product and nothing else."""
    return func in _MATMUL or func is torch.einsum


def has_matrix(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a factor of a product is a matrix, which is the same for all texts.

    Queries, keys and values are not; the weights of a router, a table of embeddings and a list of
    experts are.
    """
    factors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
    tensors = [x for x in factors if isinstance(x, Tensor)]
    return any(x.ndim < 3 for x in (tensors[1:] if func in ADDED_PRODUCTS else tensors))


def product_within(
    output: Tensor, added: Tensor, *factors: Tensor, beta: float | int = 1, **_: Any
) -> Float[Tensor, "*lead T S"]:
    """The product in the result of `baddbmm`, which added `beta * added` to it."""
    output = output.detach()
    return output.clone() if beta == 0 else output - beta * added.detach()


def read_product(
    func: Callable[..., Any], args: tuple[Any, ...], output: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    """The factors of a product; None if weights are not summed over their last axis.

    Args:
        weights: The tensors that hold the weights, by identity.
    """
    if func is torch.einsum:
        return _read_einsum(args, output, weights)
    left, right = args[:2]
    factors = (left, right, output) if id(left) in weights else (right.mT, left.mT, output.mT)
    # Weights that all texts or heads share are not those of heads.
    return Product(*factors) if factors[0].shape[:-1] == factors[2].shape[:-1] else None


def _read_einsum(
    args: tuple[Any, ...], output: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    equation = args[0]
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    factors = list(zip(inputs.split(","), operands, strict=True))
    if id(operands[0]) not in weights:
        factors.reverse()
    (w, weight), (v, value) = factors
    lead, t, s = w[:-2], w[-2:-1], w[-1:]
    width = [letter for letter in v if letter not in w]
    supported = "." not in equation and len(width) == 1 and s in v and s not in out and t not in v
    if not supported or sorted(out) != sorted([*lead, t, *width]):
        return None
    value = value.permute([v.index(letter) for letter in [*lead, s, *width] if letter in v])
    for axis, letter in enumerate(lead):
        value = value if letter in v else value.unsqueeze(axis)
    return Product(
        weight, value, output.permute([out.index(letter) for letter in [*lead, t, *width]])
    )
