"""A model, what it reads and what it should keep: run with any gates on its heads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.models import Attention, edit_heads, heads_of, mean_heads
from headwise.scoring._checkpoint import ScoringCheckpoint
from headwise.scoring._loss import Loss, PerText, texts_in
from headwise.scoring._task_score import Inputs
from headwise.tables import Head

Gates = Float[Tensor, "*B N"]
"""A gate for each head of the model, in the order of `Run.heads`; perhaps for each text too."""


@dataclass(frozen=True)
class GatedModel:
    """A model under gates: 1 leaves a head, 0 takes it out.

    Attributes:
        attentions: All of the model.
        loss: What the model should keep.
        batches: What it reads.
        reference: What the means of heads are taken over; None is `batches`.
        kept: What was found so far, where finding it takes long.
    """

    model: nn.Module
    attentions: list[Attention]
    loss: Loss
    batches: Sequence[Inputs]
    reference: Sequence[Inputs] | None = None
    kept: ScoringCheckpoint = field(default_factory=ScoringCheckpoint)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        return tuple(heads_of(self.attentions))

    @cached_property
    def kv_heads(self) -> np.ndarray:
        """The key/value head that each head reads."""
        sites = [attention.site for attention in self.attentions]
        return np.concatenate([np.arange(s.n_heads) * s.n_kv_heads // s.n_heads for s in sites])

    @cached_property
    def full(self) -> list[Tensor | None]:
        """Of each batch the embeddings of the full model, for a loss that compares."""
        if not self.loss.compares:
            return [None] * len(self.batches)
        with torch.no_grad():
            return [self.loss.of(self.model(**batch), batch) for batch in self.batches]

    @cached_property
    def means(self) -> dict[Attention, Float[Tensor, "H Dv"]]:
        """What each head of the full model gives in the mean over all tokens."""
        return mean_heads(self.model, self.attentions, self.reference or self.batches)

    def open_gates(self, at: int, start: Float[Tensor, " N"]) -> Float[Tensor, "B N"]:
        """Gates for each text of a batch, which gradients reach."""
        texts = texts_in(self.batches[at])
        return start.expand(texts, len(start)).clone().requires_grad_()

    def losses(self, at: int, gates: Gates, mean: bool = False) -> PerText:
        """The loss of each text of a batch under gates."""
        return self.judge(at, self.output(at, gates, mean))

    def judge(self, at: int, output: Any) -> PerText:
        """The loss of each text of a batch, from what the model gave for it."""
        return self.loss.per_text(output, self.batches[at], self.full[at])

    def output(self, at: int, gates: Gates, mean: bool = False) -> Any:
        """What the model gives for a batch under gates.

        Args:
            mean: Whether a closed gate gives the head's mean, and not nothing.
        """
        means = self.means if mean else {}

        def edit(attention: Attention, heads: Tensor) -> Tensor:
            gate = gates[..., self._places[attention]].to(heads.dtype)
            if gate.ndim > 1:
                gate = gate.view(len(gate), *[1] * (heads.ndim - 3), -1)
            gate = gate[..., None]
            if not mean:
                return heads * gate
            return heads * gate + means[attention].to(heads.dtype) * (1 - gate)

        with edit_heads(self.model, self.attentions, edit):
            return self.model(**self.batches[at])

    @cached_property
    def _places(self) -> dict[Attention, slice]:
        """Which gates are those of an attention."""
        ends = np.cumsum([attention.site.n_heads for attention in self.attentions]).tolist()
        spans = zip(self.attentions, [0, *ends], ends, strict=False)
        return {attention: slice(start, end) for attention, start, end in spans}
