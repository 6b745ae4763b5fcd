"""Take the work of heads away while a block runs: by gates, by zeros, by their mean."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._interrupts import reversible, slowly_reversible
from headwise.errors import ArgumentError, ShapeError
from headwise.models._check import check_model
from headwise.models.capture import InputTracker
from headwise.models.ownership._attention import Attention, by_attention, find_attentions
from headwise.models.ownership._edit import Edit, edit_heads
from headwise.models.ownership._example_input import batches_of, run
from headwise.tables import Head, HeadsLike

Mode = Literal["zero", "mean"]


@reversible
def gate_heads(
    model: nn.Module,
    attentions: Sequence[Attention],
    gates: Callable[[Attention], Float[Tensor, "*B H"] | None],
) -> Iterator[None]:
    """Multiply what each head gives with a gate while the block runs.

    Gates of 1 leave the answer equal to the last bit; a gate of 0 removes its head. Gradients
    reach the gates; with a row of gates for each text of a batch, one backward pass gives the
    gradients of every text.

    Args:
        attentions: All of the model, as `find_attentions` gives them.
        gates: The gates of an attention, asked for in each call; None leaves its heads alone.
    Raises:
        ShapeError: gates are not one for each head, or not a row for each text.
    """

    def edit(attention: Attention, heads: Tensor) -> Tensor:
        gate = gates(attention)
        if gate is None:
            return heads
        wanted = heads.shape[-2:-1] if gate.ndim == 1 else (heads.shape[0], heads.shape[-2])
        if gate.shape != wanted:
            raise ShapeError(
                f"gate_heads: gates {tuple(gate.shape)} for {attention.site.name}, where heads "
                f"are {tuple(heads.shape)}. Give {tuple(wanted)}."
            )
        gate = gate.to(heads.dtype)
        gate = gate if gate.ndim == 1 else gate.view(len(gate), *[1] * (heads.ndim - 3), -1)
        return heads * gate[..., None]

    with edit_heads(model, attentions, edit):
        yield


@dataclass(frozen=True)
class Ablation:
    """What is taken away while `ablate` runs.

    Attributes:
        heads: The heads, in the order of their addresses.
        mode: What stands in their place: zeros, or what they give in the mean.
        mean_of: Over what the mean is taken: "reference" or "batch"; "" under zeros.
    """

    heads: tuple[Head, ...]
    mode: Mode
    mean_of: Literal["", "reference", "batch"]


@slowly_reversible
def ablate(
    model: nn.Module, heads: HeadsLike, mode: Mode = "zero", reference: Iterable[Any] | None = None
) -> Iterator[Ablation]:
    """Take heads out of a model while the block runs, without changing its weights.

    Under `mode="zero"` they add nothing, as if they were pruned. Under `mode="mean"` they add what
    they add in the mean over tokens, whatever the text; padding is no token.

    Args:
        model: Any model that can be watched, and whose heads reach an output projection.
        heads: `"L5.H3"`, `(5, 3)`, a list of either, or `{5: [3]}`.
        reference: Batches that the mean is taken over, each the model's keyword arguments, a
            tuple of arguments or the only one. None takes it over the tokens of each batch
            that the model is called on.
    Yields:
        What is taken away, and over what the mean is taken.
    Raises:
        HeadError: a head does not exist or is named twice.
        ArgumentError: the model is none, `mode` is unknown, or `reference` is empty, holds texts
            or is given for zeros.
        UnsupportedError: the heads of the model cannot be told apart where they are mixed.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer, x = MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
        >>> with ablate(layer, "L0.H1") as taken:
        ...     without = layer(x)
        >>> [str(head) for head in taken.heads], torch.equal(without, layer(x))
        (['L0.H1'], False)
    """
    model = check_model("ablate", model)
    batches = _checked(mode, reference)
    attentions = find_attentions(model, batches[0] if batches else None)
    chosen = by_attention(heads, attentions)
    means = mean_heads(model, attentions, batches) if batches else {}

    def instead(attention: Attention, given: Tensor) -> Tensor:
        if mode == "zero":
            return torch.zeros_like(given[..., :1, :1])
        mean = means.get(attention)
        return _Mean.of(attention, given, inputs).value() if mean is None else mean

    with replace_heads(model, attentions, chosen, instead) as inputs:
        removed = tuple(a.site.heads()[head] for a, some in chosen.items() for head in some)
        source: Literal["reference", "batch"] = "reference" if batches else "batch"
        yield Ablation(tuple(sorted(removed)), mode, source if mode == "mean" else "")


@reversible
def replace_heads(
    model: nn.Module,
    attentions: Sequence[Attention],
    chosen: Mapping[Attention, Sequence[int]],
    instead: Edit,
) -> Iterator[InputTracker]:
    """Let some heads give something else while the block runs; the others give what they gave.

    Args:
        attentions: All of the model, as `find_attentions` gives them.
        chosen: The heads, as `by_attention` gives them.
        instead: From an attention and what its heads give to what those heads give instead.
    Yields:
        The text that the model is reading.
    """

    def edit(attention: Attention, given: Tensor) -> Tensor:
        if attention not in chosen:
            return given
        gone = torch.zeros(given.shape[-2], 1, dtype=torch.bool, device=given.device)
        gone[chosen[attention]] = True
        return torch.where(gone, instead(attention, given).to(given), given)

    with edit_heads(model, attentions, edit) as inputs:
        yield inputs


def mean_heads(
    model: nn.Module, attentions: Sequence[Attention], batches: Iterable[Any]
) -> dict[Attention, Float[Tensor, "H Dv"]]:
    """What each head gives in the mean over the tokens of some batches, padding left out."""
    found: dict[Attention, _Mean] = {}

    def note(attention: Attention, heads: Tensor) -> Tensor:
        new = _Mean.of(attention, heads, inputs)
        found[attention] = found[attention] + new if attention in found else new
        return heads

    with edit_heads(model, attentions, note) as inputs:
        for batch in batches:
            run(model, batch)
    return {attention: mean.value() for attention, mean in found.items()}


@dataclass(frozen=True)
class _Mean:
    total: Float[Tensor, "H Dv"]
    tokens: Tensor

    @classmethod
    def of(
        cls, attention: Attention, heads: Float[Tensor, "B T H Dv"], inputs: InputTracker
    ) -> "_Mean":
        real = _real(inputs.of(attention.site.stack).text.real, heads)
        chosen = torch.where(real[..., None, None], heads, 0.0)
        dims = tuple(range(heads.ndim - 2))
        return cls(chosen.double().sum(dims), real.sum())

    def __add__(self, other: "_Mean") -> "_Mean":
        return _Mean(self.total + other.total, self.tokens + other.tokens)

    def value(self) -> Float[Tensor, "H Dv"]:
        return self.total / self.tokens


def _real(real: Bool[Tensor, "B S"] | None, heads: Tensor) -> Bool[Tensor, "B T"]:
    lead = heads.shape[:-2]
    if real is None or len(lead) != 2 or len(real) != lead[0] or real.shape[1] < lead[1]:
        return torch.ones(lead, dtype=torch.bool, device=heads.device)
    return real[:, -lead[1] :].to(heads.device)


def _checked(mode: str, reference: Iterable[Any] | None) -> list[Any]:
    if mode not in ("zero", "mean"):
        raise ArgumentError(f"ablate: mode={mode!r}. Choose 'zero' or 'mean'.")
    if reference is None:
        return []
    if mode == "zero":
        raise ArgumentError("ablate: reference is given for mode='zero'. Say mode='mean'.")
    batches = batches_of(reference, "ablate")
    if not batches:
        raise ArgumentError("ablate: reference holds no batch. Give one or more.")
    return batches
