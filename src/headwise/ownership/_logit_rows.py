"""Which rows of which weights scale the attention logits of each head, and scaling them in place.

An ownership map does not say this. Its gradients are of weights, which sharded training frees after
each layer, and a norm between a weight and the queries undoes its scale. So the outputs of linear
layers and norms are multiplied by scales of 1 in one pass. Gradients of these show the last rows
that each head alone depends on, whatever the architecture calls them, and whether its logits grow
with them: no rule by names could be trusted with weights that are in training.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from headwise._evaluation import differentiable_evaluation
from headwise._torch_private import has_joined_weight
from headwise.capture import AttentionCall, SoftmaxCall, capture_calls
from headwise.errors import UnsupportedError
from headwise.models import Hooks, is_sharded
from headwise.ownership._model_runs import call_model, random_like
from headwise.ownership._ownership_map import gradients
from headwise.ownership._projection import is_linear, is_transposed
from headwise.ownership._unembedding import is_norm

# Relative tolerances of what is computed in a dtype; a wrong factor differs more.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_DEFAULT_TOLERANCE = 1e-3
_TINY = 1e-300
# Which factor rows take when the logits of query head h are scaled by g_h. Keys are scaled by
# c = √max g over the query heads that read them, and queries by the rest.
#   query  g_h / c          key    c
#   whole  g_h, as the keys they meet belong to all heads
Share = Literal["query", "key", "whole"]
# By module: the logarithms of the scales of its outputs, as leaves of autograd.
_Scales = Mapping[str, Float[Tensor, " _"]]
# By module: how each head grows with each of these.
_Rates = Mapping[str, Float64[Tensor, "_ _"]]
# By site: its first call, with the logits by head.
_Calls = Mapping[str, tuple[AttentionCall, Float[Tensor, "H B T S"]]]


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Rows of one parameter, each owned by a head or by a group that shares keys.

    Attributes:
        share: Which factor of their owners the rows take.
        parameter: Its qualified name.
        shape: The shape in which a factor for each row is multiplied with it.
        owners: The owner of each row; -1 if the row is not scaled.
    """

    share: Share
    parameter: str
    shape: tuple[int, ...]
    owners: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class LogitRows:
    """The rows of weights that scale the attention logits of each head of one site.

    Attributes:
        groups: The keys that each query head reads: heads with the same number share them.
        rows: The rows that are scaled, with the head or group that each belongs to.
        softcap: What caps the logits; None: nothing.
    """

    groups: Int[Tensor, " H"]
    rows: tuple[ScaledRows, ...]
    softcap: float | None

    def scaled(self, factors: Float64[Tensor, " H"]) -> Iterator[tuple[ScaledRows, Tensor]]:
        """The factor of each row so that the logits of each head are scaled by its factor."""
        keys = factors.new_zeros(int(self.groups.max()) + 1)
        keys = keys.scatter_reduce(0, self.groups, factors, "amax").sqrt()
        shares = {"query": factors / keys[self.groups], "key": keys, "whole": factors}
        for rows in self.rows:
            own = shares[rows.share][rows.owners.clamp(min=0)]
            yield rows, torch.where(rows.owners >= 0, own, 1.0)


def find_logit_rows(
    model: nn.Module, batch: Any, layers: Collection[int] | None = None
) -> dict[str, LogitRows]:
    """Find the rows of weights by which the logits of each head can be scaled, by name of site.

    Each head must own the outputs of the last linear layer or norm that its queries and keys depend
    on, and its logits must grow with its factor and with nothing else. No weight is changed.

    Args:
        batch: What the model is run on, once: keyword arguments, a tuple, or a single argument.
        layers: The layers to look at, counted from 0. None is all of them.
    """
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "attn_config", None)):
        clamp = getattr(part, "clip_qkv", None)
        if clamp is not None:
            raise UnsupportedError(
                f"QKClip: {type(model).__name__} clamps its queries and keys at "
                f"clip_qkv={clamp}, so weights do not scale them. Set clip_qkv to None."
            )
    with differentiable_evaluation(model, weights=True):
        calls, scales, growth = _trace(model, batch, layers)
        if not calls:
            raise UnsupportedError(
                f"QKClip: no attention was captured in {type(model).__name__}. Give a monitor of a "
                f"model that headwise.observe can watch."
            )
        rows = {site: _rows_of(model, site, *call, scales) for site, call in calls.items()}
        _refuse_tied_or_frozen(model, rows)
        _refuse_unscaled(rows, calls, scales, growth)
    return rows


@torch.no_grad()
def scale_rows(model: nn.Module, changes: Iterable[tuple[ScaledRows, Tensor]]) -> None:
    """Multiply rows by their factors; an exception leaves all as they were."""
    # Free the copies of weights that FSDP2 gathers and that autocast casts.
    torch.clear_autocast_cache()
    module: Any  # FSDP2 gives each module that it shards these methods
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()
    factors: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for rows, factor in changes:
        _, before = factors.get(rows.parameter, (rows.shape, 1.0))
        factors[rows.parameter] = rows.shape, factor * before
    ready = [
        (weight, _fitted(name, factor, shape, weight))
        for name, (shape, factor) in factors.items()
        if (factor != 1.0).any()
        for weight in [model.get_parameter(name)]
    ]
    saved: list[tuple[Tensor, Tensor]] = []
    weight: Tensor
    try:
        for weight, fitted in ready:
            saved.append((weight, weight.detach().clone()))
            weight.mul_(fitted)
    except BaseException:
        for weight, values in saved:
            weight.copy_(values)
        raise


def _fitted(name: str, factor: Tensor, shape: tuple[int, ...], weight: Any) -> Tensor:
    """The factors in the shape, the dtype and the sharding of a weight."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    ready = factor.to(device=weight.device, dtype=dtype).view(shape)

    def fits(x: Tensor) -> bool:
        return all(n in (1, m) for n, m in zip(ready.shape, x.shape, strict=True))

    if not is_sharded(weight):
        if fits(weight):
            return ready
    else:
        from torch.distributed.tensor import DTensor, Replicate

        mesh = weight.device_mesh
        if fits(weight):  # of the whole weight, of which each rank holds some rows
            return DTensor.from_local(ready, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if fits(weight.to_local()):  # under tensor parallelism, of this rank's heads
            return DTensor.from_local(ready, mesh, weight.placements, run_check=False)
    raise UnsupportedError(
        f"QKClip: {name} has shape {tuple(weight.shape)}, expected {tuple(ready.shape)}: the "
        f"weight changed after the clip was made, or is sharded along several axes of a mesh. "
        f"Make a new clip, or shard along one axis."
    )


def _logits_of(site: str, call: AttentionCall) -> Float[Tensor, "H B T S"]:
    """The logits of a call without position biases and softcap; those of captured queries and keys
    lack the scale too, which does not matter where they are compared with one another."""
    if not isinstance(call, SoftmaxCall):
        q, k = call.q.transpose(0, 1), call.k.transpose(0, 1)
        return q @ k.repeat_interleave(len(q) // len(k), 0).mT
    if call.plain is None:
        raise UnsupportedError(
            f"QKClip: the largest logit of {site or 'the model'} "
            f"is unknown, since its softmax is implemented "
            f"by hand and more than a scale or a mask is applied to its products of queries "
            f"and keys, such as a position bias. Load the model with "
            f"attn_implementation='sdpa', or leave its layer out with HeadMonitor(layers=...)."
        )
    return torch.where(call.plain.isfinite(), call.plain, 0.0).transpose(0, 1)


def _trace(
    model: nn.Module, batch: Any, layers: Collection[int] | None
) -> tuple[_Calls, _Scales, dict[str, float]]:
    """Run a model once, with scales on the outputs of its linear layers and norms."""
    calls: dict[str, tuple[AttentionCall, Tensor]] = {}
    scales: dict[str, Tensor] = {}
    growth: dict[str, float] = {}

    @torch.enable_grad()  # callbacks run without gradients
    def record(call: AttentionCall) -> None:
        site = active.sites.of(call)
        if (layers is None or site.layer in layers) and site.name not in calls:
            calls[site.name] = call, _logits_of(site.name, call)

    def scale(name: str, module: nn.Module, _: Any, output: Any) -> Tensor | None:
        """Continue with a copy that autograd traces back to the scales, and no further."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        # A gain of several axes, as one of each head, has its units along one.
        axes = 1 if is_linear(module) else module.get_parameter("weight").ndim
        units = output.detach().flatten(-axes)
        if name not in scales:
            scales[name] = torch.zeros(units.shape[-1], device=units.device, requires_grad=True)
            growth[name] = _growth(module, output)
        return (units * scales[name].exp()).to(output.dtype).view(output.shape)

    with Hooks() as hooks:
        active = hooks.enter_context(capture_calls(model, record, keep_graph=True))
        for name, module in model.named_modules():
            if is_linear(module) or _has_gain(module):
                hooks.after(module, partial(scale, name))
        call_model(model, batch)
    return calls, scales, growth


def _rates(heads: Float[Tensor, "n ..."], scales: _Scales) -> _Rates:
    """How each head grows with the scales of the modules that it depends on."""
    grads = zip(scales, gradients(heads, [*scales.values()]), strict=True)
    # Heads are parts of one tensor: without one gradient there is none.
    return {name: torch.stack(x).double().cpu() for name, x in grads if x[0] is not None}


def _has_gain(module: nn.Module) -> bool:
    """Whether a module multiplies what it has normalized by a learned gain, one of each feature."""
    gain = getattr(module, "weight", None)
    return is_norm(module) and isinstance(gain, nn.Parameter) and gain.ndim > 0


def _growth(module: nn.Module, output: Tensor) -> float:
    """How an output grows with the weights of its module: 1 as they do, less where a norm adds a
    constant to its gain."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if is_linear(module) or not weights:
        return 1.0
    value = output.detach()
    grads = torch.autograd.grad(output, weights, value, retain_graph=True, allow_unused=True)
    pairs = zip(weights, grads, strict=True)
    rates = [float((x.detach() * grad).sum()) for x, grad in pairs if grad is not None]
    return sum(rates) / max(float(value.double().square().sum()), _TINY)


def _rows_of(
    model: nn.Module, site: str, call: AttentionCall, logits: Tensor, scales: _Scales
) -> LogitRows:
    """The rows that scale the logits of each head of one site."""
    groups = torch.arange(len(logits))
    parts: list[tuple[Share, _Rates]]
    if isinstance(call.module, nn.MultiheadAttention):
        return LogitRows(groups, tuple(_torch_rows(site, call.module)), call.rule.softcap)
    if isinstance(call, SoftmaxCall):
        # Queries and keys cannot be distinguished: with groups of one head both take a root.
        both = _rates(logits, scales)
        own = {name: rates * (rates.count_nonzero(0) == 1) for name, rates in both.items()}
        is_shared = any((rates.count_nonzero(0) > 1).any() for rates in both.values())
        parts = [("whole" if is_shared else "query", own)]
    else:
        q, k = call.q.transpose(0, 1), call.k.transpose(0, 1)
        queries = _rates(q, scales)
        if not queries:
            raise UnsupportedError(
                f"QKClip: the queries of {site or 'the model'} "
                f"come from no linear layer or norm whose weights "
                f"can be scaled, as where they are packed by quantization. Clip the model before "
                f"it is quantized, or leave its layer out with HeadMonitor(layers=...)."
            )
        groups, keys, are_shared = _key_groups(_rates(k, scales), len(q))
        parts = [("query", queries), ("key", keys)]
        if are_shared:
            whole = _met_by_shared_keys(q, k, keys, scales)
            rest = {name: rates * (whole[name] == 0) for name, rates in queries.items()}
            parts = [("query", rest), ("whole", whole), ("key", keys)]
    rows: list[ScaledRows] = []
    for share, of_part in parts:
        for name, rates in of_part.items():
            used = rates != 0
            if (used.sum(0) > 1).any():
                kind = type(model.get_submodule(name)).__name__
                raise UnsupportedError(
                    f"QKClip: the heads of {site or 'the model'} "
                    f"share the weights of {name} ({kind}), the "
                    f"last ones that scale their {'keys' if share == 'key' else 'queries'}, such "
                    f"as the gain of a norm over all heads, so one head cannot be clipped "
                    f"alone. Leave its layer out with HeadMonitor(layers=...)."
                )
            if used.any():
                owners = torch.where(used.any(0), used.int().argmax(0), -1)
                rows += _parameters_of(model, name, share, owners)
    return LogitRows(groups, tuple(rows), call.rule.softcap)


def _key_groups(rates: _Rates, n_heads: int) -> tuple[Int[Tensor, " H"], _Rates, bool]:
    """The key group of each query head, the rates of one group alone, and if others exist.

    Keys that a group of queries shares may have been repeated for each of them.
    """
    if not rates:  # as where they come from packed weights
        return torch.arange(n_heads), {}, True
    used = torch.cat([*rates.values()], 1) != 0
    distinct, groups = torch.unique(used, dim=0, return_inverse=True)
    users = distinct.sum(0)
    own = (distinct * (users == 1.0)).double().split([x.shape[1] for x in rates.values()], 1)
    groups = groups.repeat_interleave(n_heads // len(groups))
    return groups, dict(zip(rates, own, strict=True)), bool((users > 1).any())


def _met_by_shared_keys(q: Tensor, k: Tensor, keys: _Rates, scales: _Scales) -> _Rates:
    """The rates of queries in the features of the keys that no head has to itself, as in latent
    attention: queries take the whole factor there, and share it in the others."""
    features = torch.diag_embed(torch.ones(k.shape[-1])).to(k)[:, None, None]  # D 1 1 D
    shared = torch.full((k.shape[-1],), not keys)
    for name, rates in _rates(features * k[0], scales).items():
        shared |= ((rates != 0) & ~keys[name].any(0)).any(1)
    return _rates(torch.where(shared.to(q.device), q, 0.0), scales)


def _parameters_of(
    model: nn.Module, name: str, share: Share, owners: Int[Tensor, " units"]
) -> Iterator[ScaledRows]:
    """The weight and the bias behind the outputs of a module."""
    module = model.get_submodule(name)
    dot = f"{name}." if name else ""
    shape: tuple[int, ...] = (1, -1) if is_transposed(module) else (-1, 1)
    if _has_gain(module):
        shape = tuple(module.get_parameter("weight").shape)
    yield ScaledRows(share, f"{dot}weight", shape, owners)
    if getattr(module, "bias", None) is not None:
        yield ScaledRows(share, f"{dot}bias", shape if _has_gain(module) else (-1,), owners)


def _torch_rows(site: str, module: nn.MultiheadAttention) -> Iterator[ScaledRows]:
    """The rows of torch's layer, which holds weights in place of linear layers."""
    dot = f"{site}." if site else ""
    heads = torch.arange(module.num_heads).repeat_interleave(module.head_dim)
    none = torch.full_like(heads, -1)
    shares: dict[Share, list[Tensor]] = {"query": [heads, none, none], "key": [none, heads, none]}
    for share, parts in shares.items():
        if has_joined_weight(module):
            yield ScaledRows(share, f"{dot}in_proj_weight", (-1, 1), torch.cat(parts))
        else:
            yield ScaledRows(share, f"{dot}{share[0]}_proj_weight", (-1, 1), heads)
        if module.in_proj_bias is not None:
            yield ScaledRows(share, f"{dot}in_proj_bias", (-1,), torch.cat(parts))


def _refuse_tied_or_frozen(model: nn.Module, rows_by_site: Mapping[str, LogitRows]) -> None:
    users: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        users.setdefault(weight, []).append(name)
    for site, rows in rows_by_site.items():
        for part in rows.rows:
            weight = model.get_parameter(part.parameter)
            modules = {model.get_submodule(x.rpartition(".")[0]) for x in users[weight]}
            if len(modules) == 1 and weight.requires_grad:
                continue
            tied = f"tied to {' and '.join(users[weight])}"
            problem = tied if len(modules) > 1 else "frozen"
            raise UnsupportedError(
                f"QKClip: {part.parameter}, which scales the logits of {site or 'the model'}, "
                f"is {problem}. "
                f"Train a weight of its own, or leave its layer out with HeadMonitor(layers=...)."
            )


def _refuse_unscaled(
    rows_by_site: Mapping[str, LogitRows],
    calls: _Calls,
    scales: _Scales,
    growth: Mapping[str, float],
) -> None:
    """Refuse heads whose logits would not be scaled by their factors, and by nothing else.

    If all rows took random factors to the power of t, the logits would too. The derivative of this
    at t = 0 is read from gradients, so that no weight has to change.
    """
    generator = torch.Generator().manual_seed(0)
    moved = {name: torch.zeros_like(scale, dtype=torch.float64, device="cpu")
             for name, scale in scales.items()}  # fmt: skip
    logs: dict[str, Tensor] = {}  # by site, of its heads
    for site, rows in rows_by_site.items():
        factors = 0.3 + 0.4 * torch.rand(len(rows.groups), generator=generator).double()
        logs[site] = factors.log()
        for part, factor in rows.scaled(factors):
            name, _, kind = part.parameter.rpartition(".")
            if kind == "weight":
                moved[name] += growth[name] * factor.log()
    for site, (call, logits) in calls.items():
        if isinstance(call.module, nn.MultiheadAttention):
            continue  # its weights are known, and nothing lies between them and its logits
        weighted = (logits * random_like(logits[0])).detach().double().cpu().flatten(1)
        grown = sum(rates @ moved[name] for name, rates in _rates(logits, scales).items())
        tolerance = _TOLERANCE.get(logits.dtype, _DEFAULT_TOLERANCE) * weighted.norm(dim=1)
        wrong = ((grown - logs[site] * weighted.sum(1)).abs() > tolerance).nonzero()
        if len(wrong):
            raise UnsupportedError(
                f"QKClip: scaling the queries and keys of head {int(wrong[0])} of "
                f"{site or 'the model'} does not scale its logits by the same factor, as with a "
                f"norm without a gain, keys shared with another layer or a shifted weight. Leave "
                f"its layer out with HeadMonitor(layers=...)."
            )
