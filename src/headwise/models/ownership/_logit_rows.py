"""Which rows of which weights scale the attention logits of each head, found by gradients."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from headwise._torch_private import has_joined_weight
from headwise.errors import UnsupportedError
from headwise.models.ownership._attention import is_transposed
from headwise.models.ownership._logit_scaling import ScaledRows, reshard, restore_rows, scale_rows
from headwise.models.ownership._logit_trace import LogitCall, LogitTrace, is_norm, trace_logits

# Relative tolerances of logits whose weights were scaled and rounded; a wrong factor differs more.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_DEFAULT_TOLERANCE = 1e-3
# Which factor rows take when the logits of query head h are scaled by g_h. Keys are scaled by
# c = √max g over the query heads that read them, and queries by the rest.
#   query  g_h / c          key    c
#   whole  g_h, as the keys they meet belong to all heads
#   half   √g_h, as the rows of queries and keys cannot be distinguished
Share = Literal["query", "key", "whole", "half"]
_Used = Mapping[str, Bool[Tensor, "_ _"]]


@dataclass(frozen=True, eq=False)
class LogitRows:
    """The rows of weights that scale the attention logits of each head of one site.

    Attributes:
        site: The name of the module that attends.
        groups: The keys that each query head reads: heads with the same number share them.
        rows: The rows that are scaled, with the head or group that each belongs to.
        softcap: What caps the logits; None: nothing.
    """

    site: str
    groups: Int[Tensor, " H"]
    rows: tuple[tuple[Share, ScaledRows], ...]
    softcap: float | None

    def scaled(self, factors: Float64[Tensor, " H"]) -> Iterator[tuple[ScaledRows, Tensor]]:
        """The rows to scale so that the logits of each head are scaled by its factor."""
        keys = factors.new_zeros(int(self.groups.max()) + 1)
        keys = keys.scatter_reduce(0, self.groups, factors, "amax").sqrt()
        shares: dict[Share, Tensor] = {
            "query": factors / keys[self.groups],
            "key": keys,
            "whole": factors,
            "half": factors.sqrt(),
        }
        return ((rows, shares[share]) for share, rows in self.rows)


def find_logit_rows(
    model: nn.Module, batch: Any, layers: Collection[int] | None = None
) -> dict[str, LogitRows]:
    """Find the rows of weights by which the logits of each head can be scaled, by name of site.

    Queries and keys are traced back by gradients to the last linear layer or norm that they
    depend on, of which each head must own its outputs. Then all heads are scaled on trial, and
    their logits must change by their factors and by nothing else. The model is left as it was.

    Args:
        batch: What the model is run on, twice: keyword arguments, a tuple, or a single argument.
        layers: The layers to look at, counted from 0. None is all of them.
    Raises:
        UnsupportedError: no attention was captured, or the logits of a head cannot be scaled
            exactly by weights of its own.
    """
    trace = trace_logits(model, batch, layers)
    if not trace.calls:
        raise UnsupportedError(
            f"QKClip: no attention was captured in {type(model).__name__}. Give a monitor of a "
            f"model that headwise.observe can watch."
        )
    _refuse_clamped(model)
    reshard(model)
    rows = {site: _rows_of(model, site, calls[0], trace) for site, calls in trace.calls.items()}
    _refuse_tied_or_frozen(model, rows)
    _try(model, batch, layers, trace, rows)
    return rows


def _refuse_clamped(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "attn_config", None)):
        clamp = getattr(part, "clip_qkv", None)
        if clamp is not None:
            raise UnsupportedError(
                f"QKClip: {type(model).__name__} clamps its queries and keys at "
                f"clip_qkv={clamp}, so weights do not scale them. Set clip_qkv to None."
            )


def _refuse_tied_or_frozen(model: nn.Module, rows_by_site: Mapping[str, LogitRows]) -> None:
    users: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(weight), []).append(name)
    for site, rows in rows_by_site.items():
        for _, part in rows.rows:
            weight = model.get_parameter(part.parameter)
            parents = {id(model.get_submodule(x.rpartition(".")[0])) for x in users[id(weight)]}
            if len(parents) > 1:
                problem = f"tied to {' and '.join(users[id(weight)])}"
            elif not weight.requires_grad:
                problem = "frozen"
            else:
                continue
            raise UnsupportedError(
                f"QKClip: {part.parameter}, which scales the logits of {site}, is {problem}. "
                f"Train a weight of its own, or leave its layer out with HeadMonitor(layers=...)."
            )


def _rows_of(model: nn.Module, site: str, call: LogitCall, trace: LogitTrace) -> LogitRows:
    if isinstance(call.module, nn.MultiheadAttention):
        groups = torch.arange(call.module.num_heads)
        return LogitRows(site, groups, tuple(_torch_rows(site, call.module)), call.softcap)
    if call.q is None or call.k is None:
        used = trace.dependence(call.logits)
        own = {name: units & (units.sum(0) == 1) for name, units in used.items()}
        is_shared = any((units.sum(0) > 1).any() for units in used.values())
        groups = torch.arange(len(call.logits))
        shared_rows = [("whole" if is_shared else "half", own)]
        return _checked(model, site, call, groups, shared_rows)  # type: ignore[arg-type]
    groups, keys, are_shared = _key_groups(trace.dependence(call.k), len(call.q))
    queries = trace.dependence(call.q)
    if not queries:
        raise UnsupportedError(
            f"QKClip: the queries of {site} come from no linear layer or norm whose weights can be "
            f"scaled, as where they are packed by quantisation. Clip the model before it is "
            f"quantised, or leave its layer out with HeadMonitor(layers=...)."
        )
    if not are_shared:
        return _checked(model, site, call, groups, [("query", queries), ("key", keys)])
    common = _common_features(call.k, keys, trace)
    split = {
        share: trace.dependence(torch.where(features, call.q, 0.0))
        for share, features in (("query", ~common), ("whole", common))
    }
    mixed = any((split["query"][name] & units).any() for name, units in split["whole"].items()
                if name in split["query"])  # fmt: skip
    if mixed or not any(units.any() for units in keys.values()):
        return _checked(model, site, call, groups, [("whole", queries)])
    return _checked(
        model, site, call, groups,
        [("query", split["query"]), ("whole", split["whole"]), ("key", keys)],
    )  # fmt: skip


def _key_groups(used: _Used, n_heads: int) -> tuple[Int[Tensor, " H"], dict[str, Tensor], bool]:
    """The key group of each query head, the outputs of one group alone, and if others exist.

    Keys that a group of queries shares may have been repeated for each of them.
    """
    if not used:
        return torch.arange(n_heads), {}, True
    joined = torch.cat([*used.values()], 1)
    first = [next(i for i, row in enumerate(joined) if row.equal(own)) for own in joined]
    distinct = sorted(set(first))
    numbers = torch.tensor([distinct.index(i) for i in first])
    groups = numbers.repeat_interleave(n_heads // len(numbers))
    alone = joined[distinct].sum(0) == 1
    widths = [units.shape[1] for units in used.values()]
    own = torch.split(joined[distinct] & alone, widths, 1)
    are_shared = bool((joined[distinct].sum(0) > 1).any())
    return groups, dict(zip(used, own, strict=True)), are_shared


def _common_features(
    k: Float[Tensor, "Hkv B S D"], own: _Used, trace: LogitTrace
) -> Bool[Tensor, " D"]:
    """The features of keys that also depend on outputs which several heads share."""
    features = torch.diag_embed(torch.ones(k.shape[-1])).to(k)[:, None, None]  # D 1 1 D
    used = trace.dependence(features * k[0])
    if not used:  # the keys come from packed weights, say
        return torch.zeros(k.shape[-1], dtype=torch.bool, device=k.device)
    return torch.stack(
        [(units & ~own[name].any(0)).any(1) for name, units in used.items()]
    ).any(0).to(k.device)  # fmt: skip


def _checked(
    model: nn.Module,
    site: str,
    call: LogitCall,
    groups: Int[Tensor, " H"],
    parts: Sequence[tuple[Share, _Used]],
) -> LogitRows:
    """The rows of these outputs, if each belongs to one head."""
    rows: list[tuple[Share, ScaledRows]] = []
    for share, used in parts:
        for name, units in used.items():
            if (units.sum(0) > 1).any():
                kind = type(model.get_submodule(name)).__name__
                raise UnsupportedError(
                    f"QKClip: the heads of {site} share the weights of {name} ({kind}), the "
                    f"last ones that scale their {'keys' if share == 'key' else 'queries'}, such "
                    f"as the gain of a norm over all heads, so one head cannot be clipped "
                    f"alone. Leave its layer out with HeadMonitor(layers=...)."
                )
            if units.any():
                owners = torch.where(units.any(0), units.int().argmax(0), -1)
                rows += [(share, part) for part in _parameters_of(model, name, owners)]
    return LogitRows(site, groups, tuple(rows), call.softcap)


def _parameters_of(
    model: nn.Module, name: str, owners: Int[Tensor, " units"]
) -> Iterator[ScaledRows]:
    """The weight and the bias behind the outputs of a module."""
    module = model.get_submodule(name)
    dot = f"{name}." if name else ""
    shape: tuple[int, ...] = (-1, 1)
    if is_norm(module):
        shape = tuple(module.get_parameter("weight").shape)
    elif is_transposed(module):
        shape = (1, -1)
    yield ScaledRows(f"{dot}weight", shape, owners)
    if getattr(module, "bias", None) is not None:
        yield ScaledRows(f"{dot}bias", shape if is_norm(module) else (-1,), owners)


def _torch_rows(site: str, module: nn.MultiheadAttention) -> Iterator[tuple[Share, ScaledRows]]:
    """The rows of torch's layer, which holds weights in place of linear layers."""
    dot = f"{site}." if site else ""
    heads = torch.arange(module.num_heads).repeat_interleave(module.head_dim)
    none = torch.full_like(heads, -1)
    shares: tuple[Share, Share] = ("query", "key")
    for share, name, place in zip(shares, ("q_proj_weight", "k_proj_weight"), (0, 1), strict=True):
        joined = torch.cat([heads if i == place else none for i in range(3)])
        if has_joined_weight(module):
            yield share, ScaledRows(f"{dot}in_proj_weight", (-1, 1), joined)
        else:
            yield share, ScaledRows(f"{dot}{name}", (-1, 1), heads)
        if module.in_proj_bias is not None:
            yield share, ScaledRows(f"{dot}in_proj_bias", (-1,), joined)


def _try(
    model: nn.Module,
    batch: Any,
    layers: Collection[int] | None,
    trace: LogitTrace,
    rows: Mapping[str, LogitRows],
) -> None:
    """Scale the logits of all heads by factors of their own, and compare them; then undo it."""
    generator = torch.Generator().manual_seed(0)
    factors = {
        site: 0.3 + 0.7 * torch.rand(len(x.groups), generator=generator, dtype=torch.float64)
        for site, x in rows.items()
    }
    changes = [part for site, x in rows.items() for part in x.scaled(factors[site])]
    saved = scale_rows(model, changes)
    try:
        after = trace_logits(model, batch, layers, replayed=trace.inputs)
    finally:
        restore_rows(model, saved)
    for site, calls in trace.calls.items():
        for before, scaled in zip(calls, after.calls[site], strict=True):
            _compare(site, before.logits.detach(), scaled.logits, factors[site])


def _compare(
    site: str, before: Float[Tensor, "H B T S"], after: Tensor, factors: Float64[Tensor, " H"]
) -> None:
    tolerance = _TOLERANCE.get(before.dtype, _DEFAULT_TOLERANCE)
    expected = before.double() * factors.to(before.device)[:, None, None, None]
    error = (after.double() - expected).abs().flatten(1).amax(1)
    wrong = (error > tolerance * before.double().abs().flatten(1).amax(1)).nonzero().flatten()
    if len(wrong):
        raise UnsupportedError(
            f"QKClip: scaling the queries and keys of head {int(wrong[0])} of {site} does not "
            f"scale its logits by the same factor, as with a norm without a gain, keys shared with "
            f"another layer or a shifted weight. Leave its layer out with HeadMonitor(layers=...)."
        )
