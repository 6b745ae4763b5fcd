"""One pass of a model in which the outputs of linear layers and norms are leaves of autograd."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import UnsupportedError
from headwise.models._hooks import Hooks
from headwise.models.capture import AttentionCall, Sites, SoftmaxCall, capture_calls
from headwise.models.ownership._attention import is_linear
from headwise.models.ownership._model_runs import call_model
from headwise.models.ownership._output_dependence import output_dependence

# The positional and the keyword arguments of one call of a module.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class LogitCall:
    """The logits of one attention call, and the queries and keys behind them if they are known.

    Logits lack position biases and softcap; those of captured queries and keys also the scale.
    """

    module: nn.Module
    logits: Float[Tensor, "H B T S"]
    q: Float[Tensor, "H B T D"] | None
    k: Float[Tensor, "Hkv B S D"] | None
    softcap: float | None


@dataclass(frozen=True, eq=False)
class LogitTrace:
    """The attention calls of one pass by site, and the calls of the modules around them.

    Attributes:
        outputs: The outputs of each linear layer and norm, by its name: leaves of autograd, so
            that queries and keys depend on the last of these modules alone.
        inputs: What each of these modules, and each layer of torch, was called with.
    """

    calls: dict[str, list[LogitCall]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[Inputs]] = field(default_factory=dict)

    def dependence(self, heads: Float[Tensor, "n ..."]) -> dict[str, Bool[Tensor, "n _"]]:
        """Which outputs of each module each head depends on, by the last axis of the module."""
        return output_dependence(heads, self.outputs)


def trace_logits(
    model: nn.Module,
    batch: Any,
    layers: Collection[int] | None = None,
    replayed: Mapping[str, list[Inputs]] | None = None,
) -> LogitTrace:
    """Run a model once in evaluation mode and trace its attention logits back to its weights.

    Args:
        layers: The layers whose calls are traced, counted from 0. None is all of them.
        replayed: Inputs that replace those of modules, by the modules' names, so that the logits of
            a layer depend on its own weights alone. Nothing is attached to the graph.
    Raises:
        UnsupportedError: the logits of a call are unknown.
    """
    trace, sites = LogitTrace(), Sites(model)

    def record(call: AttentionCall) -> None:
        site = sites.of(call, active)
        if layers is None or site.layer in layers:
            with torch.set_grad_enabled(replayed is None):
                trace.calls.setdefault(site.name, []).append(_logit_call(site.name, call))

    keep = replayed is None
    with Hooks() as hooks, in_evaluation(model), torch.set_grad_enabled(keep):
        active = hooks.enter_context(capture_calls(model, record, keep_graph=keep))
        for name, module in model.named_modules():
            if replayed is None and (is_linear(module) or is_norm(module)):
                hooks.after(module, partial(_cut, trace.outputs.setdefault(name, [])))
            if replayed is None and _has_rows(module):
                note = partial(_note, trace.inputs.setdefault(name, []))
                hooks.before(module, note, with_kwargs=True)
            elif replayed is not None and name in replayed:
                hooks.before(module, partial(_replay, iter(replayed[name])), with_kwargs=True)
        call_model(model, batch)
    return trace


def is_norm(module: nn.Module) -> bool:
    """Whether a module multiplies what it has normalised by a learned gain."""
    gain = getattr(module, "weight", None)
    named = "norm" in type(module).__name__.lower()
    return named and isinstance(gain, nn.Parameter) and not any(module.children())


def _has_rows(module: nn.Module) -> bool:
    return is_linear(module) or is_norm(module) or isinstance(module, nn.MultiheadAttention)


def _note(calls: list[Inputs], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    calls.append((args, kwargs))


def _replay(
    calls: Iterator[Inputs], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    return next(calls, (args, kwargs))


def _cut(calls: list[Tensor], module: nn.Module, _: Any, output: Any) -> Tensor | None:
    """Continue with a copy of an output that autograd traces back to the module, no further."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    # A gain of several axes, as one of each head, has its units along one.
    axes = 1 if is_linear(module) else module.get_parameter("weight").ndim
    leaf = output.detach().flatten(-axes).requires_grad_() if axes else output.detach()
    calls.append(leaf)
    return leaf.clone().view(output.shape)  # a copy, since some models change it in place


def _logit_call(site: str, call: AttentionCall) -> LogitCall:
    softcap = call.rule.softcap
    if isinstance(call, SoftmaxCall):
        if call.plain is None:
            raise UnsupportedError(
                f"QKClip: the largest logit of {site} is unknown, since its softmax is implemented "
                f"by hand and more than a scale or a mask is applied to its products of queries "
                f"and keys, such as a position bias. Load the model with "
                f"attn_implementation='sdpa', or leave its layer out with HeadMonitor(layers=...)."
            )
        logits = torch.where(call.plain.isfinite(), call.plain, 0.0).transpose(0, 1)
        return LogitCall(call.module, logits, None, None, softcap)
    q, k = call.q.transpose(0, 1), call.k.transpose(0, 1)
    logits = q @ k.repeat_interleave(len(q) // len(k), 0).mT
    return LogitCall(call.module, logits, q, k, softcap)
