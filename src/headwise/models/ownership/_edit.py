"""Edit the outputs of heads before the output projection mixes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise._torch_private import in_backward, replace_submodule
from headwise.errors import UnsupportedError
from headwise.models._hooks import Hooks
from headwise.models._model import run_uncompiled
from headwise.models.capture import (
    AttentionCall,
    InputTracker,
    Stacks,
    capture_calls,
    ordinary_path,
)
from headwise.models.ownership._attention import Attention
from headwise.models.ownership._model_runs import float_outputs

# Maps an attention and the outputs of its heads, `[B, T, H, Dv]`, to the edited outputs.
Edit = Callable[[Attention, Tensor], Tensor]


@contextmanager
def edit_heads(
    model: nn.Module, attentions: Sequence[Attention], edit: Edit
) -> Iterator[InputTracker]:
    """Apply `edit` to the outputs of heads while the block runs.

    An edit that returns its argument leaves the model's output equal to the last bit; for
    `nn.MultiheadAttention`, which never calls its output projection, equal to that of its
    ordinary path. Gradients pass through. All hooks are removed afterwards, also after an
    exception.

    Args:
        attentions: All attentions of the model, from `find_attentions`.
    Yields:
        A tracker of the inputs that the model is reading.
    Raises:
        UnsupportedError: layers that share their weights run again in a backward pass, or
            gradients are enabled and an attention has no output projection that is a module.
    """
    with ExitStack() as stack:
        stack.enter_context(run_uncompiled())
        inputs = stack.enter_context(InputTracker(model, Stacks(model).roots).follow())
        unprojected: dict[int, _CallOrder] = {}
        for module in {attention.module: None for attention in attentions}:
            calls = [attention for attention in attentions if attention.module is module]
            order = _CallOrder(calls, inputs)
            if calls[0].projection is None:
                unprojected[id(module)] = order
                continue
            install = _before_projection if calls[0].called else _around_torch_layer
            stack.enter_context(install(calls[0], order, edit))
        if unprojected:
            stack.enter_context(_where_attended(model, unprojected, edit))
        stack.enter_context(ordinary_path(model))
        yield inputs


def check_edits_reach(model: nn.Module, attentions: Sequence[Attention], batch: Any) -> None:
    """Check that heads without an output projection that is a module can be edited.

    Raises:
        UnsupportedError: what is written into them does not reach the output.
    """
    for attention in attentions:
        if attention.projection is not None:
            continue

        def disturb(current: Attention, heads: Tensor, disturbed: Attention = attention) -> Tensor:
            return 1.0 - heads if current == disturbed else heads

        with torch.no_grad():
            intact = float_outputs(model, batch)
            with edit_heads(model, attentions, disturb):
                outputs = float_outputs(model, batch)
        if all(torch.equal(*pair) for pair in zip(intact, outputs, strict=True)):
            raise UnsupportedError(
                f"heads: edits of the heads of {attention.site.name} do not reach the output, and "
                f"there is no output projection whose input could be edited instead. Watch this "
                f"model without editing its heads."
            )


class _CallOrder:
    """Which of the attentions that share a module is running: they run in order in each pass."""

    def __init__(self, calls: list[Attention], inputs: InputTracker) -> None:
        self._calls, self._inputs = calls, inputs
        self._position, self._pass = 0, -1

    def next(self) -> Attention:
        if len(self._calls) == 1:
            return self._calls[0]
        if in_backward() and not self._inputs.inside:
            raise UnsupportedError(
                f"heads: {self._calls[0].site.name} is shared by {len(self._calls)} layers, and in "
                f"a backward pass it is unknown which of them runs. Turn checkpointing off."
            )
        if self._inputs.passes != self._pass:
            self._position, self._pass = 0, self._inputs.passes
        self._position += 1
        return self._calls[(self._position - 1) % len(self._calls)]


@contextmanager
def _before_projection(first: Attention, order: _CallOrder, edit: Edit) -> Iterator[None]:
    n_heads = first.site.n_heads

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = args[0].unflatten(-1, (n_heads, -1))
        edited = edit(order.next(), heads)
        return args if edited is heads else (edited.flatten(-2), *args[1:])

    with Hooks() as hooks:
        hooks.before(first.output.module, enter)
        yield


@contextmanager
def _where_attended(
    model: nn.Module, orders: Mapping[int, _CallOrder], edit: Edit
) -> Iterator[None]:
    """Write into the outputs of attention in place, for a model that multiplies them by a bare
    parameter: no module takes them as input."""

    def attended(call: AttentionCall) -> None:
        order = orders.get(id(call.module))
        if order is None:
            return
        if call.heads.requires_grad:
            raise UnsupportedError(
                f"heads: {type(call.module).__name__} has no output projection that is a module, "
                f"so its heads are edited in place. Disable gradients (torch.no_grad)."
            )
        heads = call.heads.transpose(1, 2)
        edited = edit(order.next(), heads)
        if edited is not heads:
            heads.copy_(edited)

    # Attached, so that heads say whether gradients would pass through them.
    with capture_calls(model, attended, keep_graph=True):
        yield


@contextmanager
def _around_torch_layer(first: Attention, order: _CallOrder, edit: Edit) -> Iterator[None]:
    """Edit the heads of torch's layer, which reads the weight of its projection without calling it.

    While it runs, its projection is the identity, so that it returns the outputs of its heads. The
    real projection follows, in the layout in which the layer computes it itself.
    """
    layer, projection = first.module, first.output.module
    weight, bias = first.output.weight, first.output.bias

    def enter(*_: Any) -> None:
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        replace_submodule(layer, "out_proj", SimpleNamespace(weight=identity, bias=None))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        replace_submodule(layer, "out_proj", projection)
        if output is None:  # an exception was raised
            return None
        joined = output[0]
        first_batch = joined.ndim == 3 and not getattr(layer, "batch_first", False)
        heads = joined.unflatten(-1, (first.site.n_heads, -1))
        heads = heads.transpose(0, 1) if first_batch else heads
        heads = heads if heads.ndim == 4 else heads[None]
        edited = edit(order.next(), heads).flatten(2).transpose(0, 1)  # T B d_model
        out = F.linear(edited.flatten(0, 1), weight, bias).view(edited.shape)
        if joined.ndim == 2:
            out = out[:, 0]
        elif not first_batch:
            out = out.transpose(0, 1)
        return out, *output[1:]

    with Hooks() as hooks:
        hooks.callback(replace_submodule, layer, "out_proj", projection)
        hooks.before(layer, enter)
        hooks.after(layer, leave, always_call=True)
        yield
