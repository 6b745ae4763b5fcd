"""`importance`: the front door of the methods."""

from collections.abc import Callable
from importlib.metadata import version
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.gauge._batches import Given, read_given
from headwise.gauge._loss import Inputs, Loss, find_loss
from headwise.gauge._methods import METHODS
from headwise.gauge._run import Run
from headwise.gauge._still import held_still
from headwise.models import find_attentions, fingerprint
from headwise.scores import Scores

Tell = Callable[[int, int], None]


def importance(
    model: nn.Module,
    batches: Given,
    method: str = "half-gate",
    *,
    loss: Loss | str | Callable[[Any, Inputs], Tensor] | None = None,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    rounds: int = 1,
    on_step: Tell | None = None,
) -> Scores:
    """How much each head matters to what a model should keep doing.

    Every head has a gate on its output: 1 leaves it, 0 takes it out. The methods:

    - `half-gate`: |∂loss/∂gate| with all gates at ½; works where the gradient at the full model
      is zero, and counts what heads do together. One backward pass for all heads.
    - `gradient`: the same with all gates at 1.
    - `curvature`: ½‖∂u/∂gate‖² of the embedding `u` of each text, by random directions.
    - `ablation`: what the loss grows by without the head, exactly; its output is replaced by its
      mean over the texts. One forward pass for each head. `zero-ablation`: by zeros.

    The model computes in evaluation mode, and has its weights, gradients and flags as they were
    when this returns or raises.

    Args:
        model: Any model whose output projections can be found.
        batches: Texts, or batches: mappings of the model's inputs by name.
        method: One of those above.
        loss: `lm`, `masked-lm`, `label`, `embedding`, or a function of the model's output and
            the batch that gives the loss of each text. None takes the one that goes with the
            class: `lm` for causal models, `masked-lm`, `label` where batches have labels,
            `embedding` for models without a head.
        tokenizer: That of the model, for texts. A text that is too long becomes several.
        max_tokens: The most tokens in one text. None is what the model can read.
        rounds: How often to score. With several, the least important heads go after each, and
            the others are scored anew, since heads back each other up.
        on_step: Told after each step how many are done, of how many in this round.
    Returns:
        The scores, in units of the loss, never below 0 but for the ablations.
    Raises:
        ArgumentError: a method, loss or number of rounds that does not exist or does not fit.
        UnsupportedError: the heads of the model cannot be gated exactly.
    """
    if method not in METHODS:
        raise ArgumentError(
            f"importance: method={method!r} is none of {', '.join(METHODS)}. Give one of them."
        )
    read = read_given(batches, model, tokenizer, max_tokens)
    found = find_loss(loss, model, read[0])
    with held_still(model), torch.inference_mode(False), torch.enable_grad():
        run = Run(model, find_attentions(model, read[0]), found, read)
        values, numbers = _in_rounds(run, method, rounds, on_step or (lambda done, total: None))
    return Scores(
        heads=run.heads,
        kv_heads=run.kv_heads,
        per_text=values,
        rounds=None if rounds == 1 else numbers,
        method=method,
        loss=found.name,
        model=fingerprint(model),
        versions={name: version(name) for name in ("headwise", "torch")},
    )


def _in_rounds(
    run: Run, method: str, rounds: int, tell: Tell
) -> tuple[Float[np.ndarray, "M N"], Int64[np.ndarray, " N"]]:
    """The importance of each head in its round, and the number of its round."""
    heads = len(run.heads)
    if not 1 <= rounds <= heads:
        raise ArgumentError(f"importance: rounds={rounds} for {heads} heads. Give 1 to {heads}.")
    device = next(run.model.parameters()).device
    number = np.full(heads, rounds - 1)  # until a head goes, it stays to the last
    values: Float[np.ndarray, "M N"] = np.zeros((0, heads))
    for now in range(rounds):
        gone = number < now
        scored = METHODS[method](run, torch.from_numpy(gone).to(device), tell)
        fresh = _finite(scored.double().cpu().numpy(), method)
        values = np.where(gone, values, fresh) if now else fresh
        left = np.flatnonzero(~gone)
        going = ceil(len(left) / (rounds - now))
        number[left[np.argsort(values[:, left].mean(0), kind="stable")[:going]]] = now
    return values, number


def _finite(values: Float[np.ndarray, "M N"], method: str) -> Float[np.ndarray, "M N"]:
    bad = ~np.isfinite(values).all(1)
    if bad.any():
        raise ArgumentError(
            f"importance: {method} is not finite in {bad.sum()} of {len(bad)} texts. "
            f"Leave them out, or compute in another dtype."
        )
    return values
