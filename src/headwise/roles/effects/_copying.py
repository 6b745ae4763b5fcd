"""Copying: whether a head raises the logit of the token that it reads, by the direct path."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.models import (
    device_of,
    hooked,
)
from headwise.models.texts import batches
from headwise.tables import Head, ratio_interval
from headwise.watch import Request, observe

_BATCH = 16  # sequences per forward pass
Score = tuple[float, float, float]  # with the ends of its interval


def copying_scores(
    model: nn.Module, sequences: Sequence[Sequence[int]], seed: int = 0
) -> dict[Head, Score]:
    """How surely each head raises the logit of a token that it attends to, −1 to 1.

    What the head would write for a key goes through the output projection, the last norm's gain
    and the unembedding, past all later layers. The score is the share of the sequence's other
    tokens whose logit is raised less, minus the share whose logit is raised more, each compared
    with what the head writes for other keys. A head that writes at random scores 0, one that
    copies 1, and one that suppresses what it reads −1.

    Args:
        sequences: Sequences of random tokens.
    Returns:
        The score of each head with its interval (95 %, over sequences); empty for a model
        without an unembedding or output projections that are modules.
    Source:
        Olsson et al. 2022, appendix, with ranks in place of sums; Elhage et al. 2021, on the
        eigenvalues of the OV circuit, which are positive where tokens raise themselves.
    """
    device = device_of(model)
    read = list(batches([list(ids) for ids in sequences], _BATCH, device))
    with torch.no_grad(), in_evaluation(model):
        first = {name: x[:1] for name, x in vars(read[0]).items()}
        unembed = find_unembedding(model, first)
        if unembed is None:
            return {}
        parts = [_batch_scores(model, vars(batch), unembed) for batch in read]
    if not parts[0]:
        return {}
    scores = {}
    for head in parts[0]:
        value, count = (torch.cat([part[head][i] for part in parts]).numpy() for i in (0, 1))
        ends = ratio_interval(value[:, None], count[:, None], seed=seed)
        mean = float(value.sum() / max(1.0, count.sum()))
        scores[head] = mean, float(ends[0][0]), float(ends[1][0])
    return scores


@dataclass(frozen=True)
class Unembedding:
    """The map from the residual stream to logits: the last norm's gain, then the weights.

    Attributes:
        rows: The weights of each token, times the gain.
        centred: Whether the norm subtracts the mean.
    """

    rows: Float[Tensor, "V d_model"]
    centred: bool

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def tokens(self) -> int:
        return self.rows.shape[0]

    def __call__(self, written: Float[Tensor, "B S d_model"]) -> Float[Tensor, "B S V"]:
        if self.centred:
            written = written - written.mean(-1, keepdim=True)
        return written @ self.rows.T


def _batch_scores(
    model: nn.Module, inputs: dict[str, Tensor], unembed: Unembedding
) -> dict[Head, tuple[Tensor, Tensor]]:
    """The sum of the scores of each head over the keys of each sequence, and their number."""
    with observe(model, Request(statistics=(), maps=True)) as watch:
        model(**inputs)
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    scores: dict[Head, tuple[Tensor, Tensor]] = {}
    for layer in watch.layers():
        for head, written in layer.written():
            if written.shape[-1] != unembed.width or int(ids.max()) >= unembed.tokens:
                return {}  # what returns the output is no unembedding of a residual stream
            logits = unembed(written.float()).gather(
                2, ids[:, None].expand(-1, written.shape[1], -1)
            )
            scores[head] = _ranks(logits, ids, real)
    return scores


def _ranks(
    logits: Float[Tensor, "B S S"], ids: Int[Tensor, "B S"], real: Bool[Tensor, "B S"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Per text: wins minus losses of each key's own token against other tokens; their number."""
    weights = real[..., None].to(logits)
    mean = (logits * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    logits = logits - mean  # what the head writes whatever it reads
    own = logits.diagonal(dim1=1, dim2=2)[..., None]
    others = (ids[:, :, None] != ids[:, None]) & real[:, :, None] & real[:, None]
    signs = (own - logits).sign() * others
    return signs.sum((1, 2)).double().cpu(), others.sum((1, 2)).double().cpu()


def find_unembedding(model: nn.Module, inputs: dict[str, Tensor]) -> Unembedding | None:
    """The map from the residual stream to logits: the last norm's gain, then the last module.

    None if no module with a weight per token of the vocabulary returns the model's logits.
    """
    calls: list[tuple[nn.Module, Any, Any]] = []
    with _recorded(model, calls):
        output = model(**inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return None
    for module, x, y in reversed(calls):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and _same(y, logits):
            if weight.shape[0] != logits.shape[-1] or weight.shape[1] != x.shape[-1]:
                return None
            norm = next((m for m, _, out in reversed(calls) if _same(out, x)), None)
            gain = _gain(norm, x.shape[-1], x)
            return Unembedding((weight * gain).float(), isinstance(norm, nn.LayerNorm))
    return None


@contextmanager
def _recorded(model: nn.Module, calls: list[tuple[nn.Module, Any, Any]]) -> Iterator[None]:
    """Record the first input and the output of every module without submodules."""

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor):
            calls.append((module, args[0], output))

    leaves = [module for module in model.modules() if not list(module.children())]
    with hooked(after=[(module, record) for module in leaves]):
        yield


def _same(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and torch.equal(x, y)


def _gain(norm: nn.Module | None, width: int, like: Tensor) -> Float[Tensor, " d_model"]:
    """What a norm multiplies each coordinate of a vector of unit size by."""
    if norm is None or getattr(norm, "weight", None) is None or norm.weight.shape != (width,):
        return torch.ones(width).to(like)
    signs = torch.tensor(np.resize([1.0, -1.0], width)).to(like)
    return (norm(signs) - norm(-signs)) / (2 * signs)
