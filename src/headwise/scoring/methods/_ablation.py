"""Methods that ablate one head after another, rerunning the model from the head's layer on."""

import torch
from torch import Tensor

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring._loss import PerText
from headwise.scoring.methods._suffix_replay import SuffixReplay


def ablation(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """The increase of each text's loss when a head's output is replaced by its mean."""
    return _ablate_each(gated, removed, on_progress, mean=True)


def zero_ablation(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """The increase of each text's loss when a head's output is replaced by zeros."""
    return _ablate_each(gated, removed, on_progress, mean=False)


@torch.no_grad()
def _ablate_each(
    gated: GatedModel, removed: HeadMask, on_progress: Progress, *, mean: bool
) -> PerHead:
    remaining, gates = int((~removed).sum()), (~removed).double()
    attention_of_head = [
        attention for attention in gated.attentions for _ in attention.site.heads()
    ]
    increases = []
    for index in range(len(gated.batches)):
        # The key in checkpoint files.
        name = f"batch {index}, {len(removed) - remaining} heads gone"
        increase = gated.checkpoint.table(name, gated.texts(index), len(removed))
        increase[:, removed.cpu()] = 0
        increases.append(increase)
        heads = torch.nonzero(increase.isnan().any(0)).flatten().tolist()
        if not heads:
            continue
        replay = SuffixReplay(gated.model, gated.attentions)
        with gated.checkpoint.saving():
            before = _losses_before(gated, index, gates, mean, replay)
            for done, head in enumerate(heads, (index + 1) * remaining - len(heads) + 1):
                without = gates.clone()
                without[head] = 0
                with replay.before(attention_of_head[head]):
                    losses = gated.losses(index, without, mean)
                increase[:, head] = (losses - before).double().cpu()
                gated.checkpoint.save_if_due()
                on_progress(done, remaining * len(gated.batches))
    return torch.cat(increases)


def _losses_before(
    gated: GatedModel, batch: int, gates: Tensor, mean: bool, replay: SuffixReplay
) -> PerText:
    """The loss of each text with no further head ablated; records the outputs of blocks."""
    with replay.recording():
        output = gated.output(batch, gates, mean)
    losses = gated.losses_of(batch, output)
    with replay.before(gated.attentions[-1]):
        if not torch.equal(gated.losses(batch, gates, mean), losses):
            # More than the blocks decides the output: rerun the whole model each time.
            replay.forget()
    return losses
