"""Entry points: attention, and statistics of its rows: check, choose a kernel, compute.

One rule of choice: the first kernel that can and is expected to be faster than those after it. Each
kernel has its thresholds; `benchmarks/results/kernel-choice.md` has the measurements behind them.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._native_library import library
from headwise._torch_private import Outline, eager_outline, under_autocast
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import cpu
from headwise.kernels._contract import (
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    Extras,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    check_sizes,
    compute_guarded,
)
from headwise.kernels._fused import FUSED
from headwise.kernels._rule import (
    AttentionRule,
    BiasLike,
    MaskLike,
    Sinks,
    WindowLike,
    check_rule,
    make_rule,
)
from headwise.kernels.native import NATIVE
from headwise.kernels.rows import ROWS, weights_from_lse
from headwise.kernels.triton import TRITON, TritonKernel

# In this order they are tried: the last one can compute everything.
KERNELS: tuple[AttentionKernel, ...] = (TRITON, NATIVE, FUSED, ROWS)
FALLBACK = KERNELS[-1]
# For one token, checking and choosing cost more than computing: 70 of 85 µs in a call of 12 heads
# on 64 keys. So the decision is kept for calls that differ in the values of their tensors alone.
_PREPARED: dict[Outline, ComputeHeads] = {}
# Each length of a text or of a key cache has its own; beyond so many, all are forgotten.
MOST_PREPARED = 4096


class AttendOutput(NamedTuple):
    """The heads, and the requested extras."""

    heads: Float[Tensor, "B H T Dv"]
    weights: Float[Tensor, "B H T S"] | None  # before dropout
    lse: Float[Tensor, "B H T"] | None  # nats; −inf for a query that may attend to nothing
    entropy: Float[Tensor, "B H T"] | None  # nats, of the weights of real keys, before dropout
    choice: KernelChoice  # the kernel of the heads, the form of its input, and the reasons

    @property
    def backend(self) -> str:
        """The kernel that computed the heads."""
        return self.choice.backend


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    *,
    mask: MaskLike | None = None,
    causal: bool = False,
    window: WindowLike | None = None,
    scale: float | None = None,
    bias: BiasLike | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    need_lse: bool = False,
    need_entropy: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "B H T Dv"] | AttendOutput:
    """Compute attention head by head: values weighted by how well queries match keys.

    Query head `h` reads kv head `h // (H // Hkv)`. Logits are scaled, then capped, then biased
    and masked. A query without visible keys gets zeros and a log-sum-exp of −inf, with finite
    gradients. Masked keys and values have no effect, even if they are NaN: under a mask, a query
    that sees a nonfinite key or value gets NaN, without gradient, and no other query changes.
    Queries and keys above 1e16 and values above 1e32 may count as nonfinite there, since products
    of them may overflow (in float64: 1e151 and 1e302). Requesting weights, log-sum-exp or entropy
    does not change a bit of the heads, except under dropout: then one kernel computes all of
    them. All of them are differentiable.

    Args:
        mask: Booleans (True = may attend), floats (added to the logits; −inf and the lowest of
            their dtype hide, and what is below −1e29 counts as that), or a rule of
            `headwise.masks`. `[T, S]` or `[B, H, T, S]`, with 1 to broadcast. Booleans mean the
            same in `scaled_dot_product_attention`; in `nn.MultiheadAttention` True = blocked
            (`masks.from_blocked`), and a tokenizer's 1 is a token (`masks.from_binary`), both as
            `[B, S]`, which `[:, None, None]` makes a mask. Floats that are
            all 0 or 1 are refused, since added to logits they hide nothing: give `mask.bool()`,
            `masks.from_binary(mask)`, or `bias=mask`. They are added where values cannot be
            read: while being traced, on the meta device, and inside `vmap`.
        causal: Whether a query sees only its own position and earlier ones. With `T < S` the
            last query sees the last key.
        window: How many keys are visible on each side of the query, `(left, right)`.
        scale: What `q · k` is multiplied by: any finite number. None is `1 / sqrt(D)`.
        bias: Added to the logits after the softcap.
        softcap: Logits become `softcap · tanh(logits / softcap)`.
        sinks: A further logit for each head or each query, in the denominator alone.
        dropout_p: Share of weights dropped, the rest scaled up; in training only.
        need_weights: Whether to return the weights too. They hold `B·H·T·S` numbers.
        need_lse: Whether to return the log of the sum of the exponentials too.
        need_entropy: Whether to return the entropy of each query's weights too, −Σ p ln p: from
            0 to the log of the number of its keys.
        backend: "auto", "native" (C++), "triton" (for GPUs), "fused" (torch's kernel)
            or "rows" (PyTorch).
    Returns:
        The heads; with extras an `AttendOutput`. The heads have the dtype of the inputs; for half
        precision all extras are float32.
    Raises:
        ShapeError: sizes do not fit together, or a mask does not fit them.
        MaskError: a mask is neither boolean nor float, or holds only zeros and ones as floats.
        ArgumentError: a value out of range, or a kernel that cannot follow the rule.
    Source:
        Vaswani et al. 2017, eq. 1 (arXiv:1706.03762); grouped heads: Ainslie et al. 2023
        (arXiv:2305.13245).
    """
    width = q.shape[-1] if isinstance(q, Tensor) and q.ndim else 0  # which is refused below
    rule = make_rule(
        head_dim=max(1, width), mask=mask, is_causal=causal, near=window,
        scale=scale, bias=bias, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    extras = Extras(need_weights, need_lse, need_entropy)
    return attend_by_rule(AttentionProblem(q, k, v, rule, dropout_p, extras), backend)


def attend_by_rule(
    problem: AttentionProblem, backend: str = "auto"
) -> Float[Tensor, "B H T Dv"] | AttendOutput:
    """`attend` by a rule: check the input, choose a kernel, compute."""
    q, k, v, rule, dropout_p, extras = problem
    outline = None
    if rule.is_static and not dropout_p and not any(extras):
        outline = eager_outline(q, k, v, library, cpu.HAS_AMX, rule, backend)
        prepared = None if outline is None else _PREPARED.get(outline)
        heads = None if prepared is None else prepared(q, k, v)
        if heads is not None:
            return heads
    _check(q, k, v, dropout_p)
    check_rule(rule, q, k)
    problem = problem._replace(rule=rule.simplify(q.shape[2], k.shape[2]))
    kernel, reason = kernel_for(problem, None, backend)
    choice = kernel.plan(problem, reason)
    # Autocast has already cast the projections, and would cast the products again.
    is_cast = under_autocast(q)
    with torch.autocast(q.device.type, enabled=False) if is_cast else nullcontext():
        result = _compute(kernel, problem, choice)
    prepared = None if outline is None else kernel.prepare(problem, choice)
    if outline is not None and prepared is not None:
        if len(_PREPARED) >= MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[outline] = prepared
    if not any(extras):
        return result["heads"]
    lse = result["lse"] if extras.lse else None
    return AttendOutput(result["heads"], result.get("weights"), lse, result.get("entropy"), choice)


@torch.no_grad()
def row_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
    request: RowRequest,
    *,
    backend: str = "auto",
) -> RowStatistics:
    """Compute statistics of the weights of every row, in memory linear in the text's length.

    They are exact for every rule (softcap, sinks, biases, any mask), since they are computed from
    the weights themselves. Half precisions are computed in float32. `RowStatistics.kernel` names
    the kernel that computed them: on a GPU the one in Triton and on a CPU the native one, wherever
    they can (`docs/speed.md`). What this kernel lacks comes from blocks of rows, and no more.

    Args:
        backend: "auto", "native" (one pass in C++, on a CPU), "triton" (one pass on a GPU; it has
            no `top` and `key_norms`) or "rows" (plain PyTorch).
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot compute this.
        ShapeError: a tensor of the request does not fit the texts, queries or keys.
    """
    _check_request(request, q, k)
    problem = AttentionProblem(q, k, v, rule)
    kernel, _ = kernel_for(problem, request, backend)
    lacking = _lacking(kernel, request)
    if not lacking:
        return kernel.statistics(problem, request)
    own, others = request.split(lacking)
    rest = FALLBACK.statistics(problem, others)
    return kernel.statistics(problem, own).completed(rest, _label(kernel, lacking))


def statistics_kernel(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
) -> str:
    """Name the kernel that `row_statistics` chooses for these inputs."""
    kernel, _ = kernel_for(AttentionProblem(q, k, v, rule), RowRequest())
    return _label(kernel, kernel.lacks(RowRequest()))


def summing_kernel(problem: AttentionProblem, request: RowRequest) -> TritonKernel | None:
    """The kernel of `row_statistics`, if it can add up all of the request: the one in Triton."""
    if not TRITON.is_preferred(problem, request) or _lacking(TRITON, request):
        return None
    return TRITON if TRITON.why_not(problem, request) is None else None


def _lacking(kernel: AttentionKernel, request: RowRequest) -> dict[str, str]:
    """What is requested and left to the rows kernel: its fields, and how users name them."""
    lacks = kernel.lacks(request).items()
    return {field: words for field, words in lacks if field in request.requested}


def _label(kernel: AttentionKernel, lacking: Mapping[str, str]) -> str:
    """How results name a kernel, with what it leaves to another one."""
    words = ", ".join(lacking.values())
    return f"{kernel.label} ({words}: {FALLBACK.label})" if words else kernel.label


def kernel_for(
    problem: AttentionProblem, request: RowRequest | None, backend: str = "auto"
) -> tuple[AttentionKernel, str]:
    """The kernel that computes heads, or the statistics of a request, and why it is this one.

    No value of a tensor is read.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    left_out = None
    for kernel in KERNELS:
        is_preferred = kernel.is_preferred(problem, request) if backend == "auto" else False
        if not is_preferred and kernel.name != backend:
            continue
        against = kernel.why_not(problem, request)
        if against is None and request is not None and backend != "auto":
            lacking = ", ".join(_lacking(kernel, request).values())
            against = f"it does not compute {lacking}" if lacking else None
        if against is None:
            fastest = left_out or f"{kernel.name} is the fastest for this"
            return kernel, fastest if backend == "auto" else "it was named"
        left_out = f"{kernel.name} was left out: {against}"
    function = "attend" if request is None else "row_statistics"
    if left_out is None:
        names = ", ".join(("auto", *(kernel.name for kernel in KERNELS)))
        raise ArgumentError(f"{function}: backend={backend!r} is not known. Choose one of {names}.")
    raise ArgumentError(
        f"{function}: backend={backend!r} cannot compute this: {against}. "
        f"Use backend='auto' to let {function} choose."
    )


def computes_both_at_once(problem: AttentionProblem) -> bool:
    """Whether one pass of a kernel computes heads and their statistics, as far as sizes tell."""
    return NATIVE.why_not(problem) is None


def _compute(kernel: AttentionKernel, problem: AttentionProblem, choice: KernelChoice) -> Named:
    """The heads and extras, which hidden values that are not finite do not reach."""

    def compute(problem: AttentionProblem) -> Named:
        result = kernel.attend(problem, choice)
        return result | _missing(problem, choice, result) if any(problem.extras) else result

    if problem.extras.weights or not kernel.guards_nonfinite:
        return compute_guarded(compute, problem, is_flag=choice.form == "causal")
    return compute(problem)


def _missing(problem: AttentionProblem, choice: KernelChoice, result: Named) -> Named:
    """The extras that the kernel of the heads did not return."""
    q, k, v, rule, _, extras = problem
    names = {
        name
        for name, is_requested in extras._asdict().items()
        if is_requested and name not in result
    }
    plain = rule.softcap is None and rule.sinks is None
    if names == {"weights"} and plain and "lse" in result and not result["lse"].requires_grad:
        return {"weights": weights_from_lse(q, k, rule, result["lse"], choice.wide)}
    if not names:
        return {}
    more = FALLBACK.attend(problem._replace(v=v[..., :0], dropout_p=0.0), choice)
    return {name: more[name] for name in names}


def _check(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> None:
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"attend: {name} of {kind}. Give tensors of floats.")
    if q.ndim == k.ndim == 4 and 0 in (q.shape[1], k.shape[1], q.shape[3]):
        raise ShapeError(
            f"attend: q {tuple(q.shape)}, k {tuple(k.shape)}. "
            f"Give at least one head, and a width of at least 1."
        )
    check_sizes(q, k, v)
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(f"attend: dropout_p={dropout_p}. Give a share from 0 up to 1.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(
            f"{n} {x.dtype} on {x.device}" for n, x in zip("qkv", (q, k, v), strict=True)
        )
        raise ArgumentError(f"attend: {kinds}. Bring them to one dtype and device.")


def _check_request(request: RowRequest, q: Tensor, k: Tensor) -> None:
    (B, H, T, _), S = q.shape, k.shape[2]
    fitting = {
        "received": (B, T), "keys": (B, T), "classes": (B, S), "key_norms": (B, H, S),
        "query_at": (B, T), "key_at": (B, S),
    }  # fmt: skip
    for name, shape in fitting.items():
        x = getattr(request, name)
        if x is None:
            continue
        count = x.shape[-1:] if name in ("keys", "classes") else ()
        if x.shape not in ((*shape, *count), (1, *shape[1:], *count)):
            raise ShapeError(
                f"row_statistics: {name} of shape {tuple(x.shape)} for {B} texts, {H} heads, "
                f"{T} queries and {S} keys. Give {(*shape, *count)}."
            )
