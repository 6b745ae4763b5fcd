"""What the kernel is asked for: heads, and statistics of rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name

from headwise._native import library
from headwise.kernels._guard import guard
from headwise.kernels._request import Named, RowRequest, RowStatistics
from headwise.kernels._rule import Rule, check_rule
from headwise.kernels._words import Words, cannot_follow
from headwise.kernels.native._check import dense_last, is_plain
from headwise.kernels.native._filling import KINDS, Filling
from headwise.kernels.native._rule import follow, give_rule
from headwise.masks import can_look, is_recorded, is_trained, settled

# Queries of a head up to which lanes are better filled with the heads of a group.
FEW = 8


class NativeStatistics(RowStatistics):
    """Statistics of every row, told by the native kernel."""

    @property
    def kernel(self) -> str:
        return f"native ({library().name})"


def cannot(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> str | None:
    """Why the native kernel does not compute this; None: it does. Of numbers nothing is read."""
    why = _why_none()
    if why is not None:
        return why
    if q.dtype not in KINDS or not (q.dtype == k.dtype == v.dtype):
        return f"it does not compute in {q.dtype}"
    if not (_takes(q) and _takes(k) and _takes(v)):
        return "these are not plain tensors on a CPU"
    return cannot_follow(rule, q.shape[2], k.shape[2])


def cannot_describe(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> str | None:
    """The same for statistics, for which there is no operator: numbers must be in memory."""
    why = cannot(q, k, v, rule)
    if why is None and not can_look(q, k, v, *rule.corner(q.shape[2], k.shape[2])):
        return "queries, keys, a mask, bias or sink are mapped over, or traced"
    return why


@settled
def _why_none() -> str | None:
    return None if library() else library().why


def _takes(x: Tensor) -> bool:
    """Whether the kernel takes such a tensor, by way of its operator where that is traced."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return x.device.type == "cpu"
    return x.is_cpu and is_plain(x)


def is_packed(n_queries: int, *inputs: Tensor | None) -> bool:
    """Whether a group reads its keys and values once, for the few queries of all its heads.

    Not in training, whose way back has to meet the same logits to the last bit; nor while being
    traced, since an operator does not know whether it is trained.
    """
    tensors = [x for x in inputs if x is not None]
    if torch.compiler.is_compiling() or not 0 < n_queries <= FEW:
        return False
    return can_look(*tensors) and not (is_recorded() or is_trained(*tensors))


class Heads(NamedTuple):
    """Heads, log-sum-exp, and the entropy if it was asked for."""

    found: tuple[Tensor, ...]
    finite: bool  # all heads are


def compute_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    words: Words,
    entropy: bool = False,
    packed: bool = False,
) -> Heads:
    """Heads, log-sum-exp, and with `entropy` that too, of tensors that are in memory."""
    filling = Filling.of(q, k, v)
    filling.number("packed", packed)
    follow(filling, words)
    B, H, T, _ = q.shape
    heads = ask_by_token(filling, "heads", (B, H, T, v.shape[3]))
    found = [heads, filling.ask("lse", (B, H, T))]
    if entropy:
        found.append(filling.ask("entropy", (B, H, T)))
    finite = filling.solve()
    return Heads(tuple(found), finite)


def compute_gradients(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    words: Words,
    found: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from those of what `compute_heads` found.

    Each is in the dtype of what it belongs to. What no gradient came back of has none in `grads`.
    """
    filling = Filling.of(q, k, v)
    follow(filling, words)
    back = torch.zeros_like(found[0]) if grads[0] is None else grads[0]
    heads, back = dense_last((found[0], back))
    filling.give("heads", heads, heads.shape, q.dtype, steps=3)
    filling.give("grad_heads", back, heads.shape, q.dtype, steps=3)
    for name, rows, grad in zip(("lse", "entropy"), found[1:], grads[1:], strict=False):
        filling.give(name, rows.contiguous(), q.shape[:3])
        if grad is not None:
            filling.give(f"grad_{name}", grad.contiguous(), q.shape[:3])
    # What a query gets is a sum of several tasks, and rounded only at its end.
    dq = ask_by_token(filling, "dq", q.shape, torch.float32)
    dk, dv = (ask_by_token(filling, name, x.shape) for name, x in (("dk", k), ("dv", v)))
    filling.solve("headwise_backward")
    return dq.to(q.dtype), dk, dv


def ask_by_token(
    filling: Filling, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Float[Tensor, "B H T _"]:
    """A new tensor as torch's kernel leaves it: the heads of a token side by side."""
    _, H, T, D = shape
    dtype = dtype or filling.inputs["q"].dtype
    return filling.ask(name, shape, dtype, strides=(T * H * D, D, H * D, 1), steps=3)


def native_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    request: RowRequest,
) -> RowStatistics:
    """Statistics of the weights of every row, from one pass over the keys."""
    check_rule(rule, q)
    found, finite = _describe(q, k, v if request.heads else v[..., :0], rule, request)
    if found.heads is None or rule.visible is None or finite:
        return found
    # The kernel multiplies hidden values by 0, which does not help where they are no numbers.
    safe = guard(q, k, v, rule)
    found, _ = _describe(q, k, safe.v, rule, request)
    return replace(found, heads=None if found.heads is None else safe.mark(found.heads))


def _describe(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, request: RowRequest
) -> tuple[RowStatistics, bool]:
    """What is found, and whether its heads are finite."""
    filling = Filling.of(q, k, v)
    # What keys receive is summed over strips of queries.
    filling.number("packed", request.received is None and is_packed(q.shape[2], q, k, v))
    give_rule(filling, rule)
    found = _ask_rows(filling, rule, request)
    if request.keys is not None:
        found |= _ask_keys(filling, request, request.keys)
    if request.classes is not None:
        found |= _ask_classes(filling, request, request.classes)
    if request.heads:
        found["heads"] = ask_by_token(filling, "heads", (*q.shape[:3], v.shape[3]))
    if request.received is not None:
        found["received"] = _ask_received(filling, request.received)
    finite = filling.solve()
    if "key_seen" in found:
        found["key_seen"] = found["key_seen"].view(torch.bool)
    return NativeStatistics(**found), finite


def _ask_rows(filling: Filling, rule: Rule, request: RowRequest) -> Named:
    """What is said about a row as a whole."""
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    rows = (B, H, T)
    found = {"n_keys": filling.ask("n_keys", rows, torch.int64)}
    wanted = {
        "lse": True, "max_logit": True, "max_weight": True, "sink": rule.sinks is not None,
        "entropy": request.entropy, "participation": request.participation,
        "distance": request.distance, "even_distance": request.distance,
    }  # fmt: skip
    found |= {name: filling.ask(name, rows) for name, asked in wanted.items() if asked}
    if request.argmax:
        found["argmax"] = filling.ask("argmax", rows, torch.int64)
    if request.distance:
        at = _places(request, B, T, S)
        filling.give("query_at", at.queries, (B, T))
        filling.give("key_at", at.keys, (B, S))
    return found


class _Places(NamedTuple):
    queries: Float[Tensor, "B T"]
    keys: Float[Tensor, "B S"]


def _places(request: RowRequest, B: int, T: int, S: int) -> _Places:
    """Where queries and keys stand; on the diagonal that ends in the corner if nothing is said."""
    if request.query_at is None or request.key_at is None:
        queries, keys = torch.arange(S - T, S)[None], torch.arange(S)[None]
    else:
        queries, keys = request.query_at, request.key_at
    return _Places(
        queries.to("cpu", torch.float32).expand(B, T).contiguous(),
        keys.to("cpu", torch.float32).expand(B, S).contiguous(),
    )


def _ask_keys(filling: Filling, request: RowRequest, keys: Int[Tensor, "B T N"]) -> Named:
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    N = keys.shape[-1]
    filling.number("N", N)
    at = keys.clamp(-1, S).to(torch.int32).expand(B, T, N).contiguous()  # S is no key either
    filling.give("keys", at, (B, T, N), torch.int32)
    found = {"key_seen": filling.ask("key_seen", (B, H, T, N), torch.uint8)}
    for name in _measures(filling, request):
        found[f"key_{name}"] = filling.ask(f"key_{name}", (B, H, T, N))
    return found


def _ask_classes(filling: Filling, request: RowRequest, classes: Float[Tensor, "B S C"]) -> Named:
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    C = classes.shape[-1]
    filling.number("C", C)
    classes = classes.to(torch.float32).expand(B, S, C).contiguous()
    filling.give("classes", classes, (B, S, C))
    names = ("keys", *_measures(filling, request))
    return {f"class_{name}": filling.ask(f"class_{name}", (B, H, T, C)) for name in names}


def _measures(filling: Filling, request: RowRequest) -> list[str]:
    """What is measured on single keys and on classes."""
    wanted = ["mass"]
    if request.top:
        wanted.append("top")
    if request.key_norms is not None:
        wanted.append("share")
        if "key_norms" not in filling.inputs:
            norms = request.key_norms.to(torch.float32)
            norms = norms.where(norms.isfinite(), 0.0).contiguous()
            B, H, S = (filling.sizes[name] for name in "BHS")
            filling.give("key_norms", norms, (B, H, S))
    return wanted


def _ask_received(filling: Filling, counted: Bool[Tensor, "B T"]) -> Float[Tensor, "B H S"]:
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    bytes_ = counted.expand(B, T).to(torch.uint8).contiguous()
    filling.give("counted", bytes_, (B, T), torch.uint8)
    return filling.ask("received", (B, H, S)).zero_()  # to which the kernel adds
