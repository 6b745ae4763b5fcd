"""Which rows of which weights scale the attention logits of each head, and scaling them in place.

Queries and keys are traced back by gradients to the last linear layer or norm before them, whatever
the architecture calls it. What was found is then tried out: no rule by names could be trusted with
weights that are in training.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise._torch_private import has_joined_weight
from headwise.capture import AttentionCall, SoftmaxCall, capture_calls
from headwise.errors import UnsupportedError
from headwise.models import Hooks
from headwise.ownership._attention import is_linear, is_transposed
from headwise.ownership._model_runs import call_model
from headwise.ownership._ownership_map import output_dependence

# Relative tolerances of logits whose weights were scaled and rounded; a wrong factor differs more.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_DEFAULT_TOLERANCE = 1e-3
# Which factor rows take when the logits of query head h are scaled by g_h. Keys are scaled by
# c = √max g over the query heads that read them, and queries by the rest.
#   query  g_h / c          key    c
#   whole  g_h, as the keys they meet belong to all heads
#   half   √g_h, as the rows of queries and keys cannot be distinguished
Share = Literal["query", "key", "whole", "half"]
# By module: per head, which of its outputs the head depends on.
_Used = Mapping[str, Bool[Tensor, "_ _"]]
# By module: what its calls returned.
_Outputs = Mapping[str, list[Tensor]]
# The positional and the keyword arguments of one call of a module.
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Rows of one parameter, each owned by a head or by a group that shares keys.

    Attributes:
        parameter: Its qualified name.
        shape: The shape in which a factor for each row is multiplied with it.
        owners: The owner of each row; -1 if the row is not scaled.
    """

    parameter: str
    shape: tuple[int, ...]
    owners: Int[Tensor, " n"]


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

    Each head must own the outputs of the last linear layer or norm that its queries and keys depend
    on. Then all heads are scaled on trial, and their logits must change by their factors and by
    nothing else. The model is left as it was.

    Args:
        batch: What the model is run on, twice: keyword arguments, a tuple, or a single argument.
        layers: The layers to look at, counted from 0. None is all of them.
    """
    trace = _trace(model, batch, layers)
    if not trace.calls:
        raise UnsupportedError(
            f"QKClip: no attention was captured in {type(model).__name__}. Give a monitor of a "
            f"model that headwise.observe can watch."
        )
    _refuse_clamped(model)
    _reshard(model)
    rows = {
        site: _rows_of(model, site, *calls[0], trace.outputs) for site, calls in trace.calls.items()
    }
    _refuse_tied_or_frozen(model, rows)
    _try(model, batch, layers, trace, rows)
    return rows


@torch.no_grad()
def scale_rows(model: nn.Module, changes: Iterable[tuple[ScaledRows, Tensor]]) -> dict[str, Tensor]:
    """Multiply rows by the factors of their owners; an exception leaves all as they were.

    Returns:
        The former values of what was changed, by parameter.
    """
    _reshard(model)
    factors: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for rows, per_owner in changes:
        is_owned = rows.owners >= 0
        factor = torch.where(is_owned, per_owner.cpu()[rows.owners.clamp(min=0)], 1.0)
        if rows.parameter in factors:
            factor = factor * factors[rows.parameter][1]
        factors[rows.parameter] = (rows.shape, factor)
    ready = {
        name: (weight, _fitted(name, factor, shape, weight))
        for name, (shape, factor) in factors.items()
        if (factor != 1.0).any()
        for weight in [model.get_parameter(name)]
    }
    saved: dict[str, Tensor] = {}
    try:
        for name, (weight, factor) in ready.items():
            saved[name] = weight.detach().clone()
            weight.mul_(factor)
        return saved
    except BaseException:
        _restore(model, saved)
        raise


@torch.no_grad()
def _restore(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    _reshard(model)
    for name, values in saved.items():
        model.get_parameter(name).copy_(values)


def _reshard(model: nn.Module) -> None:
    """Free the copies of weights that FSDP2 gathers and that autocast casts."""
    torch.clear_autocast_cache()
    module: Any  # FSDP2 gives each module that it shards these methods
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def _fitted(name: str, factor: Tensor, shape: tuple[int, ...], weight: Any) -> Tensor:
    """The factors in the shape, the dtype and the sharding of a weight."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    ready = factor.to(device=weight.device, dtype=dtype).view(shape)
    axis = next((i for i, n in enumerate(ready.shape) if n > 1), 0)
    fits = all(n in (1, m) for n, m in zip(ready.shape, weight.shape, strict=True))
    if not hasattr(weight, "device_mesh"):
        if fits:
            return ready
    else:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh, local = weight.device_mesh, weight.to_local()
        if fits:  # of the whole weight, of which each rank holds some rows
            return DTensor.from_local(ready, mesh, [Replicate()] * mesh.ndim, run_check=False)
        # Under tensor parallelism the rows are those of this rank's heads.
        if mesh.ndim == 1 and local.shape[axis] == ready.shape[axis]:
            return DTensor.from_local(ready, mesh, [Shard(axis)], run_check=False)
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
            f"QKClip: the largest logit of {site} is unknown, since its softmax is implemented "
            f"by hand and more than a scale or a mask is applied to its products of queries "
            f"and keys, such as a position bias. Load the model with "
            f"attn_implementation='sdpa', or leave its layer out with HeadMonitor(layers=...)."
        )
    return torch.where(call.plain.isfinite(), call.plain, 0.0).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Trace:
    """The attention calls of one pass, and the calls of the modules around them.

    Attributes:
        calls: The calls of each site, by its name, with their logits.
        outputs: The outputs of each linear layer and norm, by its name: leaves of autograd, so
            that queries and keys depend on the last of these modules alone.
        inputs: What each of these modules, and each layer of torch, was called with.
    """

    calls: dict[str, list[tuple[AttentionCall, Tensor]]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[_Inputs]] = field(default_factory=dict)


def _trace(
    model: nn.Module,
    batch: Any,
    layers: Collection[int] | None,
    replayed: Mapping[str, list[_Inputs]] | None = None,
) -> _Trace:
    """Run a model once in evaluation mode and trace its attention logits back to its weights.

    Args:
        replayed: Inputs that replace those of modules, by the modules' names, so that the logits of
            a layer depend on its own weights alone. Nothing is attached to the graph.
    """
    trace, attached = _Trace(), replayed is None

    def record(call: AttentionCall) -> None:
        site = active.site_of(call)
        if layers is None or site.layer in layers:
            with torch.set_grad_enabled(attached):
                logits = _logits_of(site.name, call)
            trace.calls.setdefault(site.name, []).append((call, logits))

    def note(name: str, _: nn.Module, *inputs: Any) -> None:
        trace.inputs.setdefault(name, []).append(inputs)

    def cut(name: str, module: nn.Module, _: Any, output: Any) -> Tensor | None:
        """Continue with a copy of an output that autograd traces back to the module, no further."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        # A gain of several axes, as one of each head, has its units along one.
        axes = 1 if is_linear(module) else module.get_parameter("weight").ndim
        leaf = output.detach().flatten(-axes).requires_grad_() if axes else output.detach()
        trace.outputs.setdefault(name, []).append(leaf)
        return leaf.clone().view(output.shape)  # a copy, since some models change it in place

    with Hooks() as hooks, in_evaluation(model), torch.set_grad_enabled(attached):
        active = hooks.enter_context(capture_calls(model, record, keep_graph=attached))
        for name, module in model.named_modules():
            scales = is_linear(module) or _is_norm(module)
            if attached and scales:
                hooks.after(module, partial(cut, name))
            if attached and (scales or isinstance(module, nn.MultiheadAttention)):
                hooks.before(module, partial(note, name), with_kwargs=True)
            elif replayed is not None and name in replayed:
                hooks.before(module, partial(_replay, iter(replayed[name])), with_kwargs=True)
        call_model(model, batch)
    return trace


def _replay(calls: Iterator[_Inputs], _: nn.Module, *inputs: Any) -> Any:
    return next(calls, inputs)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module multiplies what it has normalized by a learned gain."""
    gain = getattr(module, "weight", None)
    named = "norm" in type(module).__name__.lower()
    return named and isinstance(gain, nn.Parameter) and not any(module.children())


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


@torch.enable_grad()  # dependence is read from gradients, also where the caller needs none
def _rows_of(
    model: nn.Module, site: str, call: AttentionCall, logits: Tensor, outputs: _Outputs
) -> LogitRows:
    """The rows that scale the logits of each head of one site."""
    softcap = call.rule.softcap
    if isinstance(call.module, nn.MultiheadAttention):
        groups = torch.arange(call.module.num_heads)
        return LogitRows(site, groups, tuple(_torch_rows(site, call.module)), softcap)
    if isinstance(call, SoftmaxCall):
        both = output_dependence(logits, outputs)
        own = {name: units & (units.sum(0) == 1) for name, units in both.items()}
        is_shared = any((units.sum(0) > 1).any() for units in both.values())
        groups = torch.arange(len(logits))
        parts: list[tuple[Share, _Used]] = [("whole" if is_shared else "half", own)]
    else:
        q, k = call.q.transpose(0, 1), call.k.transpose(0, 1)
        groups, keys, are_shared = _key_groups(output_dependence(k, outputs), len(q))
        queries = output_dependence(q, outputs)
        if not queries:
            raise UnsupportedError(
                f"QKClip: the queries of {site} come from no linear layer or norm whose weights "
                f"can be scaled, as where they are packed by quantization. Clip the model before "
                f"it is quantized, or leave its layer out with HeadMonitor(layers=...)."
            )
        parts = [("query", queries), ("key", keys)]
        if are_shared:
            parts = _parts_with_shared_keys(q, k, queries, keys, outputs)
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
    return LogitRows(site, groups, tuple(rows), softcap)


def _parts_with_shared_keys(
    q: Tensor, k: Tensor, queries: _Used, keys: _Used, outputs: _Outputs
) -> list[tuple[Share, _Used]]:
    """What to scale where all heads share some features of the keys, as in latent attention: the
    queries take the whole factor in these features, and share it with the keys in the others."""
    features = torch.diag_embed(torch.ones(k.shape[-1])).to(k)[:, None, None]  # D 1 1 D
    used = output_dependence(features * k[0], outputs)
    common = torch.zeros(k.shape[-1], dtype=torch.bool)  # all, where keys come from packed weights
    for name, units in used.items():
        common |= (units & ~keys[name].any(0)).any(1)
    common = common.to(k.device)
    whole = output_dependence(torch.where(common, q, 0.0), outputs)
    rest = output_dependence(torch.where(common, 0.0, q), outputs)
    mixed = any((rest[name] & units).any() for name, units in whole.items() if name in rest)
    if mixed or not any(units.any() for units in keys.values()):
        return [("whole", queries)]
    return [("query", rest), ("whole", whole), ("key", keys)]


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


def _parameters_of(
    model: nn.Module, name: str, owners: Int[Tensor, " units"]
) -> Iterator[ScaledRows]:
    """The weight and the bias behind the outputs of a module."""
    module = model.get_submodule(name)
    dot = f"{name}." if name else ""
    shape: tuple[int, ...] = (1, -1) if is_transposed(module) else (-1, 1)
    if _is_norm(module):
        shape = tuple(module.get_parameter("weight").shape)
    yield ScaledRows(f"{dot}weight", shape, owners)
    if getattr(module, "bias", None) is not None:
        yield ScaledRows(f"{dot}bias", shape if _is_norm(module) else (-1,), owners)


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
    trace: _Trace,
    rows: Mapping[str, LogitRows],
) -> None:
    """Scale the logits of all heads by factors of their own, and compare them; then undo it."""
    generator = torch.Generator().manual_seed(0)
    factors = {
        site: 0.3 + 0.7 * torch.rand(len(x.groups), generator=generator, dtype=torch.float64)
        for site, x in rows.items()
    }
    saved = scale_rows(
        model, [part for site, x in rows.items() for part in x.scaled(factors[site])]
    )
    try:
        after = _trace(model, batch, layers, replayed=trace.inputs)
    finally:
        _restore(model, saved)
    for site, calls in trace.calls.items():
        for (_, before), (_, scaled) in zip(calls, after.calls[site], strict=True):
            _compare(site, before.detach(), scaled, factors[site])


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
