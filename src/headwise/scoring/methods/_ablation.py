"""Methods that leave one head out after another, running the model from its layer on."""

from functools import cached_property

import torch
from torch import Tensor

from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import PerText, texts_in
from headwise.scoring.methods._method import Gone, PerHead, Tell
from headwise.scoring.methods._suffix_replay import Replay


def ablation(run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
    """What the loss of each text grows by when a head gives its mean over all texts instead."""
    return _left_out(run, gone, mean=True, tell=tell)


def zero_ablation(run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
    """What the loss of each text grows by when a head gives nothing."""
    return _left_out(run, gone, mean=False, tell=tell)


@torch.no_grad()
def _left_out(run: GatedModel, gone: Gone, *, mean: bool, tell: Tell) -> PerHead:
    left = int((~gone).sum())
    found = []
    for at, batch in enumerate(run.batches):
        name = f"batch {at}, {len(gone) - left} heads gone"
        grown = run.kept.table(name, texts_in(batch), len(gone))
        grown[:, gone.cpu()] = 0
        heads = torch.nonzero(grown.isnan().any(0)).flatten().tolist()
        restarting = _Restarting(run, at, (~gone).double(), mean)
        with run.kept.filling():
            for done, head in enumerate(heads, (at + 1) * left - len(heads) + 1):
                grown[:, head] = restarting.without(head).double().cpu()
                run.kept.filled()
                tell(done, left * len(run.batches))
        found.append(grown)
    return torch.cat(found)


class _Restarting:
    """A batch that is run again and again, each time from the layer of the head left out."""

    def __init__(self, run: GatedModel, at: int, start: Tensor, mean: bool) -> None:
        self._run, self._at, self._start, self._mean = run, at, start, mean
        self._owner = [attention for attention in run.attentions for _ in attention.site.heads()]
        self._replay = Replay(run.model, run.attentions)

    @cached_property
    def _before(self) -> PerText:
        """The loss of each text with no more heads gone; what blocks gave then is recorded."""
        given = self._at, self._start, self._mean
        with self._replay.recording():
            output = self._run.output(*given)
        losses = self._run.judge(self._at, output)
        with self._replay.before(self._owner[-1]):
            if not torch.equal(self._run.losses(*given), losses):
                self._replay.forget()  # a model that blocks alone do not explain is run as a whole
        return losses

    def without(self, head: int) -> PerText:
        """What the loss of each text grows by."""
        before, gates = self._before, self._start.clone()
        gates[head] = 0
        with self._replay.before(self._owner[head]):
            return self._run.losses(self._at, gates, self._mean) - before
