"""Methods that use gradients: one backward pass scores every head in every text."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headwise._progress import Progress
from headwise.errors import ArgumentError, UnsupportedError
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring._loss import Inputs

# Random directions of `curvature`: 4 already give the order of the exact Jacobian.
_PROBES = 8
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids"}


def gradient(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """|∂loss/∂gate| of each text at the full model.

    Raises:
        ArgumentError: the loss compares with the full model, where its gradient is zero.

    Source: Michel et al. 2019, eq. 2, without its normalization of each layer.
    """
    if gated.loss.compares and not removed.any():
        raise ArgumentError(
            f"importance: the loss {gated.loss.name!r} is least at the full model, so its gradient "
            f"is 0 there. Give method='half-gate' or method='curvature', or another loss=."
        )
    return _gradients(gated, (~removed).double(), on_progress)


def half_gate(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """|∂loss/∂gate| of each text where all gates are ½, which accounts for joint effects."""
    # At the full model the loss hardly depends on a head whose work another one repeats, so that
    # both would score about 0. With all gates at ½ neither does the work alone, and both count.
    return _gradients(gated, (~removed).double() / 2, on_progress)


def curvature(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """½‖∂u/∂gate‖², `u` the embedding of a text: the second-order increase of 1 − cosine.

    Random directions replace the coordinates of `u`: the mean of (r · ∂u/∂gate)² over normal
    `r` is the squared norm.

    Raises:
        ArgumentError: the loss does not compare embeddings.
    """
    if not gated.loss.compares:
        raise ArgumentError(
            f"importance: method='curvature' needs a loss of embeddings, the loss is "
            f"{gated.loss.name!r}. Give loss='embedding', or method='half-gate'."
        )
    rng = torch.Generator().manual_seed(0)
    curvatures = []
    for index, batch in enumerate(gated.batches):
        gates = gated.trainable_gates(index, (~removed).double())
        embeddings = gated.loss.of(gated.output(index, gates), batch)
        total = torch.zeros_like(gates)
        for _ in range(_PROBES):
            probe = torch.randn(embeddings.shape, generator=rng, dtype=torch.float64)
            projection = (embeddings * probe.to(embeddings)).sum()
            total += _gradient(projection, gates, retain_graph=True).square()
        curvatures.append(total / (2 * _PROBES))
        on_progress(index + 1, len(gated.batches))
    return torch.cat(curvatures)


def _gradients(gated: GatedModel, start: Float[Tensor, " N"], on_progress: Progress) -> PerHead:
    """One backward pass per batch scores all texts, since each text has gates of its own."""
    order = None
    # .59 [.52, .70] of the time for 150 texts of 4 to 80 tokens in batches of 32, on one thread.
    if gated.loss.ignores_padding and gated.rows_per_text == 1:
        batches, order = sort_by_length(gated.batches)
        gated = replace(gated, batches=batches)
    gradients = []
    for index in range(len(gated.batches)):
        gates = gated.trainable_gates(index, start)
        losses = gated.losses(index, gates)
        gradients.append(_gradient(losses.sum(), gates).abs())
        on_progress(index + 1, len(gated.batches))
    scores = torch.cat(gradients)
    return scores if order is None else scores[torch.tensor(order).argsort()]


def sort_by_length(batches: Sequence[Inputs]) -> tuple[Sequence[Inputs], list[int] | None]:
    """The same texts with those of about equal length together, without the padding.

    On a CPU a pass takes time for each token. Batches stay as they are on other devices, or if they
    hold other inputs than tokens with padding on the right.

    Returns:
        The batches, and for each of their texts its place among all texts; None if they stay.
    """
    texts: list[dict[str, Tensor]] = []
    for batch in batches:
        mask = batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
            return batches, None
        if not batch.keys() <= _OF_TOKENS or {x.shape for x in batch.values()} != {mask.shape}:
            return batches, None
        lengths = (mask != 0).sum(1)
        if not torch.equal(mask != 0, torch.arange(mask.shape[1]) < lengths[:, None]):
            return batches, None
        # A single token predicts nothing, and two of them are what a loss may need.
        for row, n in enumerate(lengths.clamp(min=2).tolist()):
            texts.append({name: x[row, :n] for name, x in batch.items()})
    if len({tuple(sorted(text)) for text in texts}) > 1:
        return batches, None
    order = sorted(range(len(texts)), key=lambda text: len(texts[text]["attention_mask"]))
    size = len(batches[0]["attention_mask"])
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    by_length: list[Inputs] = [
        {name: pad_sequence([texts[n][name] for n in part], batch_first=True) for name in texts[0]}
        for part in parts
    ]
    return by_length, order


def _gradient(loss: Tensor, gates: Tensor, retain_graph: bool = False) -> Tensor:
    """The gradient of a number with respect to the gates.

    Raises:
        UnsupportedError: none reaches the gates of any head.
    """
    try:
        return torch.autograd.grad(loss, gates, retain_graph=retain_graph)[0]
    except RuntimeError as error:
        if "does not require grad" not in str(error) and "have been used in the graph" not in str(
            error
        ):
            raise
        raise UnsupportedError(
            "importance: no gradient of the loss reaches the gates of the heads, as behind weights "
            "that are packed by quantization or in a pass under torch.no_grad(). Give "
            "method='ablation'."
        ) from error
