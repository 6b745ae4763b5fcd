"""Whether heads copy what they read: how they move the logit of a token that they attend to."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.models import device_of
from headwise.models.texts import batches, without_logits
from headwise.ownership import find_unembedding, gain_and_bias
from headwise.tables import Head, ratio_interval
from headwise.watch import Request, observe

_BATCH = 16  # sequences per forward pass
Score = tuple[float, float, float]  # with the ends of its interval
# The weights of each token, times the gain of the last norm; and whether that subtracts the mean.
Unembedding = tuple[Float[Tensor, "V d_model"], bool]
Sums = tuple[Float[Tensor, " B"], Float[Tensor, " B"]]  # of each sequence: the score, the pairs


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
    read = list(batches([list(ids) for ids in sequences], _BATCH, device_of(model)))
    with torch.no_grad(), in_evaluation(model):
        unembedding = _unembedding(model, {name: x[:1] for name, x in read[0].items()})
        if unembedding is None:
            return {}
        parts = [_batch_scores(model, batch, unembedding) for batch in read]
    scores = {}
    for head in parts[0]:
        value, count = (torch.cat([part[head][i] for part in parts]).numpy() for i in (0, 1))
        ends = ratio_interval(value[:, None], count[:, None], seed=seed)
        mean = float(value.sum() / max(1.0, count.sum()))
        scores[head] = mean, float(ends[0][0]), float(ends[1][0])
    return scores


def _batch_scores(
    model: nn.Module, inputs: dict[str, Tensor], unembedding: Unembedding
) -> dict[Head, Sums]:
    """The sum of the scores of each head over the keys of each sequence, and their number."""
    with observe(model, Request(statistics=(), maps=True)) as watch:
        model(**inputs, **without_logits(model))
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    rows, centered = unembedding
    scores: dict[Head, Sums] = {}
    for layer in watch.layers():
        for head, written in layer.written():
            if written.shape[-1] != rows.shape[1] or int(ids.max()) >= len(rows):
                return {}  # what returns the output is no unembedding of a residual stream
            written = written.float()
            written = written - written.mean(-1, keepdim=True) if centered else written
            # Only the logits of the text's own tokens, of a vocabulary that may be large.
            scores[head] = _ranks(written @ rows[ids].mT, ids, real)
    return scores


def _ranks(
    logits: Float[Tensor, "B S S"], ids: Int[Tensor, "B S"], real: Bool[Tensor, "B S"]
) -> Sums:
    """Per text: wins minus losses of each key's own token against other tokens; their number."""
    weights = real[..., None].to(logits)
    mean = (logits * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    logits = logits - mean  # what the head writes whatever it reads
    own = logits.diagonal(dim1=1, dim2=2)[..., None]
    others = (ids[:, :, None] != ids[:, None]) & real[:, :, None] & real[:, None]
    signs = (own - logits).sign() * others
    return signs.sum((1, 2)).double().cpu(), others.sum((1, 2)).double().cpu()


def _unembedding(model: nn.Module, inputs: dict[str, Tensor]) -> Unembedding | None:
    """None if the model has no unembedding with a vector for each token."""
    found = find_unembedding(model, inputs)
    if found is None:
        return None
    module, x, norm = found
    weight = getattr(module, "weight", None)
    if weight is None or weight.shape[1:] != x.shape[-1:]:
        return None
    gain = 1.0 if norm is None else gain_and_bias(norm, x)[0]
    return (weight * gain).float(), isinstance(norm, nn.LayerNorm)
