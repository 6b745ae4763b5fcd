"""A model with a gate on every head, its batches and its loss."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import UnsupportedError
from headwise.ownership import Attention, edit_heads, heads_of, mean_heads
from headwise.scoring._loss import Inputs, Loss, PerText, texts_in
from headwise.tables import Head

GateValues = Float[Tensor, "*B N"]
"""A value for the gate of each head, in the order of `GatedModel.heads`; optionally per text."""
HeadMask = Bool[Tensor, " N"]
PerHead = Float[Tensor, "M N"]


@dataclass(frozen=True)
class GatedModel:
    """A model with a gate on every head: 1 keeps the head, 0 removes it.

    Attributes:
        attentions: Every attention of the model.
        loss: What the model should keep doing.
        batches: The inputs on which heads are scored.
        reference: The inputs over which the mean output of each head is taken; None is
            `batches`.
    """

    model: nn.Module
    attentions: list[Attention]
    loss: Loss
    batches: Sequence[Inputs]
    reference: Sequence[Inputs] | None = None

    @classmethod
    def with_loss_by_batch(
        cls,
        model: nn.Module,
        attentions: list[Attention],
        name: str,
        parts: Sequence[tuple[Inputs, Callable[[Any], Tensor]]],
        reference: Sequence[Inputs] | None = None,
    ) -> "GatedModel":
        """A model whose batches have a loss each, a function of the model's output."""
        batches = [dict(inputs) for inputs, _ in parts]
        losses = {id(one): of for one, (_, of) in zip(batches, parts, strict=True)}
        loss = Loss(name, lambda output, batch: losses[id(batch)](output))
        return cls(model, attentions, loss, batches, reference)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        return tuple(heads_of(self.attentions))

    @cached_property
    def kv_heads(self) -> np.ndarray:
        """The key/value head that each head reads."""
        sites = [attention.site for attention in self.attentions]
        return np.concatenate([np.arange(s.n_heads) * s.n_kv_heads // s.n_heads for s in sites])

    @cached_property
    def full_embeddings(self) -> list[Tensor | None]:
        """The full model's embeddings of each batch, for a loss that compares with them."""
        if not self.loss.compares:
            return [None] * len(self.batches)
        with torch.no_grad():
            return [self.loss.of(self.model(**batch), batch) for batch in self.batches]

    @cached_property
    def means(self) -> dict[Attention, Float[Tensor, "H Dv"]]:
        """The mean output of each head of the full model over all tokens."""
        return mean_heads(self.model, self.attentions, self.reference or self.batches)

    def texts(self, batch: int) -> int:
        """The number of texts in a batch; several of its rows may be one text, as in codebooks."""
        return texts_in(self.batches[batch]) // self.rows_per_text

    def trainable_gates(self, batch: int, start: Float[Tensor, " N"]) -> Float[Tensor, "B N"]:
        """Separate gates for each text of a batch, which require gradients."""
        texts = self.texts(batch)
        return start.expand(texts, len(start)).clone().requires_grad_()

    def losses(self, batch: int, gates: GateValues, mean: bool = False) -> PerText:
        """The loss of each text of a batch under the gates."""
        return self.losses_of(batch, self.output(batch, gates, mean))

    @torch.no_grad()
    def losses_without(
        self, heads: Sequence[Head], batches: Iterable[int] | None = None, *, mean: bool = True
    ) -> Float64[np.ndarray, " M"]:
        """The loss of each text of some batches, or of all, with some heads ablated."""
        gates = torch.ones(len(self.heads), dtype=torch.float64)
        gates[[self.heads.index(head) for head in heads]] = 0
        numbers = range(len(self.batches)) if batches is None else batches
        with in_evaluation(self.model):
            losses = [self.losses(n, gates, mean).double().cpu().numpy() for n in numbers]
        return np.concatenate([np.zeros(0), *losses])

    def losses_of(self, batch: int, output: Any) -> PerText:
        """The loss of each text of a batch, from the model's output for it."""
        losses = self.loss.per_text(output, self.batches[batch], self.full_embeddings[batch])
        return losses.reshape(self.texts(batch), -1).mean(1)

    def output(self, batch: int, gates: GateValues, mean: bool = False) -> Any:
        """The model's output for a batch under the gates.

        Args:
            mean: Whether a closed gate replaces the head's output by its mean instead of zeros.
        """
        means = self.means if mean else {}

        def edit(attention: Attention, heads: Tensor) -> Tensor:
            gate = gates[..., self._gate_slices[attention]].to(heads)
            if gate.ndim > 1:
                # Windows or frames of one text follow one another in the batch.
                gate = gate.repeat_interleave(max(1, len(heads) // len(gate)), 0)
                gate = gate.view(len(gate), *[1] * (heads.ndim - 3), -1)
            gate = gate[..., None]
            if not mean:
                return heads * gate
            return heads * gate + means[attention].to(heads.dtype) * (1 - gate)

        with edit_heads(self.model, self.attentions, edit):
            return self.model(**self.batches[batch])

    @cached_property
    def rows_per_text(self) -> int:
        """How many rows of the inputs attend as one text.

        Raises:
            UnsupportedError: an attention has a number of rows that the texts cannot share.
        """
        inputs = texts_in(self.batches[0])
        texts = min(inputs, max(attention.rows for attention in self.attentions))
        for attention in self.attentions:
            # One row may attend for all texts, as a learned prompt does.
            if inputs % texts or (attention.rows > 1 and attention.rows % texts):
                raise UnsupportedError(
                    f"importance: {attention.site} attends in {attention.rows} rows for "
                    f"{inputs} texts, so that it is unknown which are of which text. Give one text "
                    f"in each batch."
                )
        return inputs // texts

    @cached_property
    def _gate_slices(self) -> dict[Attention, slice]:
        """The gates of each attention."""
        ends = np.cumsum([attention.site.n_heads for attention in self.attentions]).tolist()
        spans = zip(self.attentions, [0, *ends], ends, strict=False)
        return {attention: slice(start, end) for attention, start, end in spans}
