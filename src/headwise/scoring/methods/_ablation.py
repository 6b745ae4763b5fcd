"""Methods that ablate one head after another, rerunning the model from the head's layer on."""

from functools import cached_property

import torch
from torch import Tensor

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import PerText
from headwise.scoring.methods._method import HeadMask, PerHead
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
    remaining = int((~removed).sum())
    increases = []
    for index in range(len(gated.batches)):
        name = (
            f"batch {index}, {len(removed) - remaining} heads gone"  # the key in checkpoint files
        )
        increase = gated.checkpoint.table(name, gated.texts(index), len(removed))
        increase[:, removed.cpu()] = 0
        heads = torch.nonzero(increase.isnan().any(0)).flatten().tolist()
        trial = _BatchAblation(gated, index, (~removed).double(), mean)
        with gated.checkpoint.saving():
            for done, head in enumerate(heads, (index + 1) * remaining - len(heads) + 1):
                increase[:, head] = trial.increase_without(head).double().cpu()
                gated.checkpoint.save_if_due()
                on_progress(done, remaining * len(gated.batches))
        increases.append(increase)
    return torch.cat(increases)


class _BatchAblation:
    """One batch, rerun for each ablated head from the head's layer on."""

    def __init__(self, gated: GatedModel, batch: int, gates: Tensor, mean: bool) -> None:
        self._gated, self._batch, self._gates, self._mean = gated, batch, gates, mean
        self._attention_of_head = [a for a in gated.attentions for _ in a.site.heads()]
        self._replay = SuffixReplay(gated.model, gated.attentions)

    @cached_property
    def _losses_before(self) -> PerText:
        """The loss of each text with no further head ablated; records the outputs of blocks."""
        arguments = self._batch, self._gates, self._mean
        with self._replay.recording():
            output = self._gated.output(*arguments)
        losses = self._gated.losses_of(self._batch, output)
        with self._replay.before(self._attention_of_head[-1]):
            if not torch.equal(self._gated.losses(*arguments), losses):
                # More than the blocks decides the output: rerun the whole model each time.
                self._replay.forget()
        return losses

    def increase_without(self, head: int) -> PerText:
        """The increase of each text's loss without the head."""
        before, gates = self._losses_before, self._gates.clone()
        gates[head] = 0
        with self._replay.before(self._attention_of_head[head]):
            return self._gated.losses(self._batch, gates, self._mean) - before
