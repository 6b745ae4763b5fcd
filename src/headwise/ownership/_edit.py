"""Edit the outputs of heads before the output projection mixes them: gates, zeros or their mean."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise._torch_private import in_backward, replace_submodule, uncompiled_block
from headwise.capture import AttentionCall, InputTracker, capture_calls, find_stacks
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Hooks, check_model, ordinary_path
from headwise.ownership._attention import Attention, by_attention, find_attentions
from headwise.ownership._model_runs import batches_of, float_outputs, run
from headwise.tables import Head, HeadsLike

Mode = Literal["zero", "mean"]
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
    with Hooks() as hooks:
        inputs = hooks.enter_context(InputTracker(model, find_stacks(model)).follow())
        unprojected: dict[int, Callable[[], Attention]] = {}
        for module in {attention.module: None for attention in attentions}:
            calls = [attention for attention in attentions if attention.module is module]
            following = _call_order(calls, inputs)
            if calls[0].projection is None:
                unprojected[id(module)] = following
                continue
            install = _before_projection if calls[0].called else _around_torch_layer
            install(hooks, calls[0], following, edit)
        if unprojected:
            attended = partial(_edit_attended, unprojected, edit)
            # Attached, so that heads say whether gradients would pass through them.
            hooks.enter_context(capture_calls(model, attended, keep_graph=True))
        hooks.enter_context(ordinary_path(model))
        yield inputs


@dataclass(frozen=True)
class Ablation:
    """The heads that `ablate` removes.

    Attributes:
        heads: The heads, in the order of their addresses.
        mode: What replaces their outputs: "zero" or "mean".
        mean_of: What the mean is taken over: "reference" or "batch"; "" for zeros.
    """

    heads: tuple[Head, ...]
    mode: Mode
    mean_of: Literal["", "reference", "batch"]


@uncompiled_block
def ablate(
    model: nn.Module, heads: HeadsLike, mode: Mode = "zero", reference: Iterable[Any] | None = None
) -> Iterator[Ablation]:
    """Remove heads from a model while the block runs, without changing its weights.

    Under `mode="zero"` they contribute nothing, as if they were pruned. Under `mode="mean"` they
    contribute their mean output over tokens, excluding padding, for every text.

    Args:
        model: A model that `observe` can watch and whose heads reach an output projection.
        heads: `"L5.H3"`, `(5, 3)`, a list of either, or `{5: [3]}`.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or a single
            argument. The heads are found by running the first one; the mean is taken over all of
            them. None finds the heads with a short made-up input, and takes the mean over the
            tokens of each batch that the model is called on.
    Yields:
        The removed heads, and what the mean is taken over.
    Raises:
        HeadError: a head does not exist or is named twice.
        ArgumentError: `model` is not a module, `mode` is unknown, `reference` is empty or holds
            texts, or there is none and no input can be made up.
        UnsupportedError: the heads cannot be separated at the output projection.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer, x = MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
        >>> with ablate(layer, "L0.H1") as ablation:
        ...     without = layer(x)
        >>> [str(head) for head in ablation.heads], torch.equal(without, layer(x))
        (['L0.H1'], False)
    """
    model = check_model("ablate", model)
    if mode not in ("zero", "mean"):
        raise ArgumentError(f"ablate: mode={mode!r}. Choose 'zero' or 'mean'.")
    batches = batches_of(reference, "ablate")
    attentions = find_attentions(model, batches[0] if batches else None)
    chosen = by_attention(heads, attentions)
    means = mean_heads(model, attentions, batches) if batches and mode == "mean" else {}

    def replacement(attention: Attention, outputs: Tensor) -> Tensor:
        if mode == "zero":
            return torch.zeros_like(outputs[..., :1, :1])
        if attention in means:
            return means[attention]
        total, tokens = _sum(attention, outputs, inputs)
        return total / tokens

    with replace_heads(model, attentions, chosen, replacement) as inputs:
        removed = tuple(a.site.heads()[head] for a, numbers in chosen.items() for head in numbers)
        source: Literal["reference", "batch"] = "reference" if batches else "batch"
        yield Ablation(tuple(sorted(removed)), mode, source if mode == "mean" else "")


@contextmanager
def replace_heads(
    model: nn.Module,
    attentions: Sequence[Attention],
    chosen: Mapping[Attention, Sequence[int]],
    replacement: Edit,
) -> Iterator[InputTracker]:
    """Replace the outputs of some heads while the block runs.

    Args:
        attentions: All attentions of the model, from `find_attentions`.
        chosen: The heads to replace, from `by_attention`.
        replacement: Maps an attention and the outputs of its heads to the new outputs.
    Yields:
        A tracker of the inputs that the model is reading.
    """

    def edit(attention: Attention, outputs: Tensor) -> Tensor:
        if attention not in chosen:
            return outputs
        replaced = torch.zeros(outputs.shape[-2], 1, dtype=torch.bool, device=outputs.device)
        replaced[chosen[attention]] = True
        return torch.where(replaced, replacement(attention, outputs).to(outputs), outputs)

    with edit_heads(model, attentions, edit) as inputs:
        yield inputs


def mean_heads(
    model: nn.Module, attentions: Sequence[Attention], batches: Iterable[Any]
) -> dict[Attention, Float[Tensor, "H Dv"]]:
    """The mean output of each head over the tokens of some batches, excluding padding."""
    sums: dict[Attention, tuple[Tensor, Tensor]] = {}

    def add(attention: Attention, heads: Tensor) -> Tensor:
        new = _sum(attention, heads, inputs)
        known = sums.get(attention)
        sums[attention] = new if known is None else (known[0] + new[0], known[1] + new[1])
        return heads

    with edit_heads(model, attentions, add) as inputs:
        for batch in batches:
            run(model, batch)
    return {attention: total / tokens for attention, (total, tokens) in sums.items()}


def _sum(
    attention: Attention, heads: Float[Tensor, "B T H Dv"], inputs: InputTracker
) -> tuple[Float[Tensor, "H Dv"], Tensor]:
    """The sum of the outputs of heads over tokens that are no padding, and their number."""
    lead = heads.shape[:-2]
    real = inputs.of(attention.site.stack).text.written().real
    if real is not None and len(lead) == 2 and len(real) == lead[0] and real.shape[1] >= lead[1]:
        real = real[:, -lead[1] :].to(
            heads.device
        )  # over a cache only the last tokens are computed
    else:  # windows or frames of a text, which are not padded
        real = torch.ones(lead, dtype=torch.bool, device=heads.device)
    chosen = torch.where(real[..., None, None], heads, 0.0)
    return chosen.double().sum(tuple(range(heads.ndim - 2))), real.sum()


def check_edits_reach(model: nn.Module, attentions: Sequence[Attention], batch: Any) -> None:
    """Check that heads without an output projection that is a module can be edited."""
    for attention in attentions:
        if attention.projection is not None:
            continue

        def disturb(current: Attention, heads: Tensor, disturbed: Attention = attention) -> Tensor:
            return 1.0 - heads if current == disturbed else heads  # zeros change as well

        with torch.no_grad():
            intact = float_outputs(model, batch)
            with edit_heads(model, attentions, disturb):
                outputs = float_outputs(model, batch)
        if all(torch.equal(*pair) for pair in zip(intact, outputs, strict=True)):
            raise UnsupportedError(
                f"heads: edits of the heads of {attention.site} do not reach the output, and "
                f"there is no output projection whose input could be edited instead. Watch this "
                f"model without editing its heads."
            )


def _call_order(calls: list[Attention], inputs: InputTracker) -> Callable[[], Attention]:
    """A function that says which of the attentions that share a module runs next: they run in
    order in each pass."""
    position, current = 0, -1

    def following() -> Attention:
        nonlocal position, current
        if len(calls) == 1:
            return calls[0]
        if in_backward() and not inputs.inside:
            raise UnsupportedError(
                f"heads: {calls[0].site} is shared by {len(calls)} layers, and in "
                f"a backward pass it is unknown which of them runs. Turn checkpointing off."
            )
        if inputs.latest.number != current:
            position, current = 0, inputs.latest.number
        position += 1
        return calls[(position - 1) % len(calls)]

    return following


def _before_projection(
    hooks: Hooks, first: Attention, following: Callable[[], Attention], edit: Edit
) -> None:
    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = first.output.split(args[0])
        edited = edit(following(), heads)
        return args if edited is heads else (edited.reshape(args[0].shape), *args[1:])

    hooks.before(first.output.module, enter)


def _edit_attended(
    orders: Mapping[int, Callable[[], Attention]], edit: Edit, call: AttentionCall
) -> None:
    """Write into the outputs of attention in place, for a model that multiplies them by a bare
    parameter: no module takes them as input."""
    following = orders.get(id(call.module))
    if following is None:
        return
    if call.heads.requires_grad:
        raise UnsupportedError(
            f"heads: {type(call.module).__name__} has no output projection that is a module, "
            f"so its heads are edited in place. Disable gradients (torch.no_grad)."
        )
    heads = call.heads.transpose(1, 2)
    edited = edit(following(), heads)
    if edited is not heads:
        heads.copy_(edited)


def _around_torch_layer(
    hooks: Hooks, first: Attention, following: Callable[[], Attention], edit: Edit
) -> None:
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
        edited = edit(following(), heads).flatten(2).transpose(0, 1)  # T B d_model
        out = F.linear(edited.flatten(0, 1), weight, bias).view(edited.shape)
        if joined.ndim == 2:
            out = out[:, 0]
        elif not first_batch:
            out = out.transpose(0, 1)
        return out, *output[1:]

    hooks.callback(replace_submodule, layer, "out_proj", projection)
    hooks.before(layer, enter)
    hooks.after(layer, leave, always_call=True)
