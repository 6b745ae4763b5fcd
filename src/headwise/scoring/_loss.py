"""What a model should keep doing: losses, one number per text; task scores, one for all texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from headwise._display import type_of
from headwise._extras import require
from headwise.errors import ArgumentError, ShapeError
from headwise.lab import MiniGPT
from headwise.models import is_sentence_transformer, sentence_embedding, without_adapters
from headwise.models.texts import IGNORED, reads_two_texts
from headwise.ownership import logits_of

Inputs = Mapping[str, Any]
PerText = Float[Tensor, " B"]

_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Score:
    """A score of all texts together; higher is better.

    Attributes:
        name: Its name in tables.
        read: Extracts the rows that the score needs from the model's output and the batch.
        of: Computes the score from the rows of all batches, in their order.
    """

    name: str
    read: Callable[[Any, Inputs], Tensor]
    of: Callable[[Float[Tensor, "rows F"]], float]


@dataclass(frozen=True)
class Loss:
    """A loss of each text, computed from the model's output for a batch.

    Attributes:
        name: Its name in tables and plots.
        of: Computes the loss of each text from the model's output and the batch; for a loss
            that compares, the embedding of each text, a vector of length 1.
        compares: Whether the loss is 1 − cosine to the embedding of the full model. Such a loss
            has its minimum, so a gradient of zero, at the full model.
        score: The task score that belongs to the loss, which curves show too.
        ignores_padding: Whether tokens outside of `attention_mask` leave the loss as it is.
    """

    name: str
    of: Callable[[Any, Inputs], Tensor]
    compares: bool = False
    score: Score | None = None
    ignores_padding: bool = False

    def per_text(self, output: Any, batch: Inputs, full: Tensor | None = None) -> PerText:
        """Compute the loss of each text of a batch.

        Args:
            full: The full model's embeddings of the batch, for a loss that compares.
        Raises:
            ShapeError: the loss is not one number for each text.
        """
        losses = self.of(output, batch)
        if not isinstance(losses, Tensor):
            raise ShapeError(
                f"loss {self.name}: it returns {type_of(losses)}. Return a tensor of one "
                f"number for each text."
            )
        if full is not None:
            losses = 1 - (losses * full).sum(-1)
        if losses.shape != (texts_in(batch),):
            raise ShapeError(
                f"loss {self.name}: shape {tuple(losses.shape)} for {texts_in(batch)} texts. "
                f"Return one number for each text."
            )
        return losses


def texts_in(batch: Inputs) -> int:
    """Count the texts of a batch: the length of its first tensor.

    Raises:
        ArgumentError: the batch has no tensor.
    """
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    raise ArgumentError(
        f"batch: no tensor in {sorted(batch)}. Give the model's inputs by name, such as input_ids."
    )


def find_loss(loss: Any, model: nn.Module, batch: Inputs) -> Loss:
    """Resolve a loss, or choose the default of the model's class.

    Args:
        loss: A loss, its name, a function of output and batch, or None for the class's default.
    Raises:
        ArgumentError: no loss has this name, or the class has no default.
    """
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        return Loss(name, loss)
    if is_sentence_transformer(model, embeds=True) and loss in (None, "embedding"):
        return Loss("embedding", partial(_sentence_vectors, model), compares=True)
    name = _default_name(model, batch) if loss is None else loss
    if name not in _LOSSES:
        raise ArgumentError(f"loss: {name!r} is not one of {', '.join(_LOSSES)}. Give one of them.")
    resolved = _LOSSES[name]
    if name == "label" and "labels" in batch:
        return replace(resolved, score=_label_score(batch["labels"]))
    return resolved


def _default_name(model: nn.Module, batch: Inputs) -> str:
    kind = type(without_adapters(model)).__name__
    if isinstance(model, MiniGPT) or kind.endswith(_CAUSAL):
        return "lm"
    if kind.endswith("ForMaskedLM"):
        return "masked-lm"
    # A decoder that may read images, whose places in the text nobody predicts: labels say so.
    is_decoder = kind.endswith("ForConditionalGeneration") and not reads_two_texts(model)
    if is_decoder and "input_ids" in batch and ("labels" in batch or "pixel_values" not in batch):
        return "lm"
    if "labels" in batch:
        return "label"
    if kind.endswith("Model"):
        return "embedding"
    raise ArgumentError(
        f"loss: no default loss fits {kind} with inputs {', '.join(batch)}. Add labels, or "
        f"give loss=: {', '.join(_LOSSES)}, or a function of the output and the batch."
    )


def _lm(output: Any, batch: Inputs) -> Tensor:
    """Cross-entropy in nats, the mean over the predicted tokens of each text."""
    if "input_ids" not in batch:
        raise ArgumentError(
            f"loss lm: the batch has {', '.join(batch)}, no input_ids to predict. Add them, or "
            f"give another loss=."
        )
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    # A padding token on the left predicts nothing.
    labels = batch.get("labels", ids)[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
    return _token_loss(_logits(output)[:, :-1], labels, "lm")


def _masked_lm(output: Any, batch: Inputs) -> Tensor:
    """Cross-entropy in nats, the mean over the masked tokens of each text."""
    return _token_loss(_logits(output), _labels(batch, "masked-lm"), "masked-lm")


def _label(output: Any, batch: Inputs) -> Tensor:
    """The loss of the model's own head: classes, multiple labels, numbers or labels per token."""
    logits, labels = _logits(output), _labels(batch, "label")
    if logits.ndim == 3:
        return _token_loss(logits, labels, "label")
    if not labels.is_floating_point() and logits.shape[-1] > 1:
        return F.cross_entropy(logits, labels, reduction="none")
    labels = labels.to(logits.dtype).reshape(len(logits), -1)
    if logits.shape[-1] == 1:
        return (logits - labels).square().mean(-1)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)


def _token_loss(logits: Tensor, labels: Tensor, name: str) -> Tensor:
    counts = (labels != IGNORED).sum(-1)
    if not counts.all():
        raise ArgumentError(
            f"loss {name}: {int((counts == 0).sum())} of {len(counts)} texts have no token to "
            f"predict. Leave them out."
        )
    # Prompt tuning puts vectors of its own before the tokens of a text.
    logits = logits[:, -labels.shape[1] :] if labels.shape[1] else logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return token_losses(logits, labels).sum(-1) / counts


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each token, in nats; 0 where a label is ignored."""
    # Flat, since cross_entropy(logits.mT, labels) strides over the vocabulary: 2.7 s, not .8 s,
    # with the gradient, for 256 tokens of 262,144.
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return flat.view_as(labels)


def _labels(batch: Inputs, name: str) -> Tensor:
    if "labels" not in batch:
        raise ArgumentError(
            f"loss {name}: the batch has {', '.join(batch)}, no labels. Add labels to each batch, "
            f"or choose another loss."
        )
    return batch["labels"]


def _logits(output: Any) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        raise ArgumentError(
            f"loss: {type(output).__name__} has no logits. Load the model with its head, "
            f"or give loss='embedding'."
        )
    return logits


def _embeddings(output: Any, batch: Inputs) -> Float[Tensor, "B d_model"]:
    """The mean of the token vectors of each text, as a vector of length 1."""
    states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if states is None or states.ndim != 3:
        raise ArgumentError(
            f"loss embedding: {type(output).__name__} has no vector for each token. Load the model "
            f"without its head, or give another loss=."
        )
    real = batch.get("attention_mask")
    real = states.new_ones(states.shape[:2]) if real is None else real.to(states.dtype)
    pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return F.normalize(pooled, dim=-1)


def _sentence_vectors(model: nn.Module, output: Any, batch: Inputs) -> Float[Tensor, "B d_model"]:
    return F.normalize(sentence_embedding(model, output, batch), dim=-1)


def _label_score(labels: Tensor) -> Score:
    """Spearman's correlation where each text has a number as its label, else accuracy."""
    if labels.is_floating_point() and labels.numel() == len(labels):
        return Score("spearman", _predictions, lambda rows: rank_correlation(*rows.T.numpy()))
    return Score(
        "accuracy", _predictions, lambda rows: float((rows[:, 0] == rows[:, 1]).double().mean())
    )


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation; NaN where `x` or `y` is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    stats = require("scipy.stats", "hf", "importance")
    return float(stats.spearmanr(x, y).statistic)


def _predictions(output: Any, batch: Inputs) -> Float[Tensor, "rows 2"]:
    """The model's prediction beside each label."""
    logits, labels = getattr(output, "logits", output), batch["labels"]
    if labels.is_floating_point():
        predicted = logits if labels.numel() == len(labels) else (logits > 0).to(logits.dtype)
    else:
        predicted = logits.argmax(-1)
    labeled = (labels != IGNORED).flatten()
    rows = torch.stack([predicted.flatten().to(logits), labels.flatten().to(logits)], 1)
    return rows[labeled]


# 1 − cosine between a text's embedding and the full model's embedding of it.
EMBEDDING = Loss("embedding", _embeddings, compares=True, ignores_padding=True)
_LOSSES: Mapping[str, Loss] = {
    "lm": Loss("lm", _lm, ignores_padding=True),
    "masked-lm": Loss("masked-lm", _masked_lm),
    "label": Loss("label", _label),
    "embedding": EMBEDDING,
}
