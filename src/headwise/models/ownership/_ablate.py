"""Gate heads, or replace their outputs by zeros or their mean, while a block runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, ShapeError
from headwise.models._model import check_model
from headwise.models.capture import InputTracker
from headwise.models.ownership._attention import Attention, by_attention, find_attentions
from headwise.models.ownership._edit import Edit, edit_heads
from headwise.models.ownership._model_runs import batches_of, run
from headwise.tables import Head, HeadsLike

Mode = Literal["zero", "mean"]


@contextmanager
def gate_heads(
    model: nn.Module,
    attentions: Sequence[Attention],
    gates: Callable[[Attention], Float[Tensor, "*B H"] | None],
) -> Iterator[None]:
    """Multiply the output of each head by a gate while the block runs.

    Gates of 1 leave the model's output equal to the last bit; a gate of 0 removes its head.
    Gradients reach the gates; with one row of gates per text of a batch, one backward pass gives
    the gradients of every text.

    Args:
        attentions: All attentions of the model, from `find_attentions`.
        gates: Called in each pass for the gates of an attention; None leaves its heads unchanged.
    Raises:
        ShapeError: there is not one gate per head, or not one row per text.
    """

    def edit(attention: Attention, heads: Tensor) -> Tensor:
        gate = gates(attention)
        if gate is None:
            return heads
        shape = heads.shape[-2:-1] if gate.ndim == 1 else (heads.shape[0], heads.shape[-2])
        if gate.shape != shape:
            raise ShapeError(
                f"gate_heads: gates {tuple(gate.shape)} for {attention.site.name}, where heads "
                f"are {tuple(heads.shape)}. Give {tuple(shape)}."
            )
        gate = gate.to(heads.dtype)
        gate = gate if gate.ndim == 1 else gate.view(len(gate), *[1] * (heads.ndim - 3), -1)
        return heads * gate[..., None]

    with edit_heads(model, attentions, edit):
        yield


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


@contextmanager
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
    batches = _checked_reference(mode, reference)
    attentions = find_attentions(model, batches[0] if batches else None)
    chosen = by_attention(heads, attentions)
    means = mean_heads(model, attentions, batches) if batches and mode == "mean" else {}

    def replacement(attention: Attention, outputs: Tensor) -> Tensor:
        if mode == "zero":
            return torch.zeros_like(outputs[..., :1, :1])
        mean = means.get(attention)
        return _Mean.of(attention, outputs, inputs).value() if mean is None else mean

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
    means: dict[Attention, _Mean] = {}

    def add(attention: Attention, heads: Tensor) -> Tensor:
        mean = _Mean.of(attention, heads, inputs)
        means[attention] = means[attention] + mean if attention in means else mean
        return heads

    with edit_heads(model, attentions, add) as inputs:
        for batch in batches:
            run(model, batch)
    return {attention: mean.value() for attention, mean in means.items()}


@dataclass(frozen=True)
class _Mean:
    total: Float[Tensor, "H Dv"]
    tokens: Tensor

    @classmethod
    def of(
        cls, attention: Attention, heads: Float[Tensor, "B T H Dv"], inputs: InputTracker
    ) -> "_Mean":
        real = _real(inputs.of(attention.site.stack).text.written().real, heads)
        chosen = torch.where(real[..., None, None], heads, 0.0)
        dims = tuple(range(heads.ndim - 2))
        return cls(chosen.double().sum(dims), real.sum())

    def __add__(self, mean: "_Mean") -> "_Mean":
        return _Mean(self.total + mean.total, self.tokens + mean.tokens)

    def value(self) -> Float[Tensor, "H Dv"]:
        return self.total / self.tokens


def _real(real: Bool[Tensor, "B S"] | None, heads: Tensor) -> Bool[Tensor, "B T"]:
    lead = heads.shape[:-2]
    if real is None or len(lead) != 2 or len(real) != lead[0] or real.shape[1] < lead[1]:
        return torch.ones(lead, dtype=torch.bool, device=heads.device)
    return real[:, -lead[1] :].to(heads.device)


def _checked_reference(mode: str, reference: Iterable[Any] | None) -> list[Any]:
    if mode not in ("zero", "mean"):
        raise ArgumentError(f"ablate: mode={mode!r}. Choose 'zero' or 'mean'.")
    return batches_of(reference, "ablate")
