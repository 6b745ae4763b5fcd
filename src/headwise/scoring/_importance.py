"""`importance`: scores every head by one of the methods."""

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from headwise._choices import METHODS
from headwise._evaluation import differentiable_evaluation
from headwise._extras import versions
from headwise._progress import Progress, shows_progress
from headwise.checkpoints import originals_of
from headwise.errors import ArgumentError
from headwise.models import check_model, device_of, fingerprint, without_compiler
from headwise.models.texts import tokenizer_of
from headwise.ownership import find_attentions
from headwise.scoring._batches import BatchesLike, read_batches
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import Inputs, Loss, find_loss
from headwise.scoring.methods import Gates, ScoreHeads, function_of
from headwise.tables import Scores


@shows_progress("Scoring heads")
@torch.inference_mode(False)
def importance(
    model: nn.Module,
    texts: BatchesLike,
    method: str | Gates = "half-gate",
    *,
    loss: Loss | str | Callable[[Any, Inputs], Tensor] | None = None,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    rounds: int = 1,
    on_progress: Progress | None = None,
) -> Scores:
    """Score how much each head matters to what a model should keep doing.

    Every head has a gate on its output: 1 keeps the head, 0 removes it. The methods:

    - `half-gate`: |∂loss/∂gate| with all gates at ½. It works where the gradient at the full
      model is zero, and accounts for heads that act together. One backward pass for all heads.
    - `gradient`: the same with all gates at 1.
    - `curvature`: ½‖∂u/∂gate‖² of the embedding `u` of each text, estimated by random
      directions.
    - `ablation`: the exact increase of the loss without the head, whose output is replaced by
      its mean over the texts. One forward pass for each head. `zero-ablation` replaces it by
      zeros.
    - `gates`: the probability that a learned gate stays open under a penalty on open gates;
      `Gates` has the settings. Hundreds of backward passes, with intervals over seeds.

    The model runs in evaluation mode. Its weights, gradients and flags are unchanged when this
    returns or raises.

    Args:
        model: Any model whose output projections can be found, or a `SentenceTransformer`
            around one.
        texts: Texts, 16 at a time, or batches of your own, smaller where memory is short:
            mappings of the model's inputs by name.
        method: One of those above, or `Gates(...)`.
        loss: `lm`, `masked-lm`, `label`, `embedding`, or a function of the model's output and
            the batch that returns the loss of each text. None takes the loss of the model's
            class: `lm` for causal models, `masked-lm`, `label` where batches have labels,
            `embedding` for models without a head. A `SentenceTransformer` uses its own
            embedding; a function gets the output of the transformer inside.
        tokenizer: The model's tokenizer, for texts; a `SentenceTransformer` has its own. A
            text that is too long becomes several.
        max_tokens: The most tokens in one text. None is the model's limit.
        rounds: Number of rounds; each re-scores after removing the least important heads, since
            heads back each other up.
        on_progress: Called after each step with the steps done and the steps in all of this
            round.
    Returns:
        The scores, in units of the loss; never below 0, except for the ablations.
    Raises:
        ArgumentError: the method, loss or number of rounds does not exist or does not fit.
        UnsupportedError: the heads of the model cannot be gated exactly.
    """
    outer, model = without_compiler(model), check_model("importance", model)
    method_name, score_heads = _method(method)
    inputs = read_batches(texts, outer, tokenizer_of(outer, tokenizer), max_tokens)
    resolved_loss = find_loss(loss, outer, inputs[0])
    with differentiable_evaluation(outer, weights=False):
        gated = GatedModel(model, find_attentions(model, inputs[0]), resolved_loss, inputs)
        progress = on_progress or (lambda done, total: None)
        values, round_of_heads = _in_rounds(gated, score_heads, rounds, progress)
    return Scores(
        heads=gated.heads,
        kv_heads=gated.kv_heads,
        per_text=values,
        rounds=None if rounds == 1 else round_of_heads,
        method=method_name,
        loss=resolved_loss.name,
        over="seeds" if isinstance(score_heads, Gates) else "texts",
        model=fingerprint(model),
        versions=versions(),
        original=originals_of(model, gated.heads),
    )


def _method(method: str | Gates) -> tuple[str, ScoreHeads]:
    if isinstance(method, Gates):
        return "gates", method
    if not isinstance(method, str) or method not in METHODS:
        given = repr(method) if isinstance(method, str) else type(method).__name__
        raise ArgumentError(
            f"importance: method={given} is not one of {', '.join(METHODS)}. Give one "
            f"of them, and a tokenizer as tokenizer=."
        )
    return method, function_of(method)


def _in_rounds(
    gated: GatedModel, score_heads: ScoreHeads, rounds: int, on_progress: Progress
) -> tuple[Float[np.ndarray, "M N"], Int64[np.ndarray, " N"]]:
    """The score of each head in the round that removes it, and the number of that round."""
    heads = len(gated.heads)
    if not 1 <= rounds <= heads:
        raise ArgumentError(f"importance: rounds={rounds} for {heads} heads. Give 1 to {heads}.")
    device = device_of(gated.model)
    round_of_heads = np.full(heads, rounds - 1)  # a head that is never removed is in the last
    values: Float[np.ndarray, "M N"] = np.zeros((0, heads))
    for current in range(rounds):
        removed = round_of_heads < current
        scores = score_heads(gated, torch.from_numpy(removed).to(device), on_progress)
        new_values: Float[np.ndarray, "M N"] = scores.double().cpu().numpy()
        not_finite = ~np.isfinite(new_values).all(1)
        if not_finite.any():
            raise ArgumentError(
                f"importance: scores are not finite in {not_finite.sum()} of {len(not_finite)} "
                f"texts. Leave them out, or compute in another dtype."
            )
        values = np.where(removed, values, new_values) if current else new_values
        remaining = np.flatnonzero(~removed)
        number = ceil(len(remaining) / (rounds - current))
        least = np.argsort(values[:, remaining].mean(0), kind="stable")[:number]
        round_of_heads[remaining[least]] = current
    return values, round_of_heads
