"""The direct effects of heads: what each writes of a difference of logits, in one pass.

What a head adds to the residual stream reaches the logits directly, and through what later layers
make of it. The direct way is linear once the norms on it keep their scales: then all that is added
sums to the difference of logits. Gradients follow this way if they are cut at the inputs of all
modules that multiply by a matrix, but the unembedding: additions, norms and scalings remain, in
whatever order, and whatever their names.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Hooks
from headwise.ownership import (
    Attention,
    edit_heads,
    find_unembedding,
    gain_and_bias,
    has_matrix,
    is_norm,
    logits_of,
)

MEAN = -1  # in place of a token: the mean over the vocabulary
# How far the sum of what is added may be from the difference of logits, as a share of its parts.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
_LOW_PRECISION = 5e-2
_INSTEAD = "Use headwise.importance(method='ablation')."
Call = tuple[nn.Module, int]  # a module, and the number of its call in one pass
Pairs = Int[Tensor, "B 2"]  # the tokens whose logits are subtracted


@dataclass(frozen=True)
class Batch:
    """Examples of one forward pass.

    Attributes:
        inputs: The model's keyword arguments.
        positions: The token of each example at which its logits are read.
        kept: The tokens for which the model returns logits, in ascending order; empty for all.
    """

    inputs: Mapping[str, Tensor]
    positions: Int[Tensor, " B"]
    kept: tuple[int, ...] = ()

    def index(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Where the positions are in a tensor of all tokens, text by text or one after another;
        None if it is none."""
        (B, T), places = self.inputs["input_ids"].shape, self.positions.to(x.device)
        rows = torch.arange(B, device=x.device)
        if x.shape[:2] == (B, T) and x.ndim == 3:
            return rows, places
        if x.shape[:2] == (B, len(self.kept)) and x.ndim == 3:
            return rows, torch.searchsorted(torch.tensor(self.kept, device=x.device), places)
        return (rows * T + places,) if x.ndim == 2 and len(x) == B * T else None

    def logits(self, output: Any) -> Float[Tensor, "B V"]:
        """The logits at the positions, from the model's output."""
        logits = logits_of(output)
        index = None if logits is None else self.index(logits)
        if logits is None or index is None:
            shape = "no logits" if logits is None else f"logits {tuple(logits.shape)}"
            raise UnsupportedError(
                f"effects: the model returns {type(output).__name__}, {shape}, for inputs "
                f"{tuple(self.inputs['input_ids'].shape)}. Open a language model with its "
                f"language-model head."
            )
        return logits[index]


@dataclass(frozen=True)
class Written:
    """What is written at the position of each example, for each way to pair tokens.

    Attributes:
        outputs: For each attention, what its heads computed there.
        slopes: For each attention, how a difference of logits grows with what the attention adds.
        differences: The differences of logits.
        rest: What is written by no head: embeddings, other layers, biases.
    """

    outputs: Mapping[Attention, Float[Tensor, "B H Dv"]]
    slopes: Mapping[Attention, Float[Tensor, "K B d_model"]]
    differences: Float64[np.ndarray, "K B"]
    rest: Float64[np.ndarray, "K B"]

    @classmethod
    def joined(cls, parts: "Sequence[Written]") -> "Written":
        """The examples of several batches, one after another."""
        outputs, slopes = (
            {a: torch.cat([of_part[a] for of_part in of_parts], axis) for a in of_parts[0]}
            for axis, of_parts in ((0, [p.outputs for p in parts]), (1, [p.slopes for p in parts]))
        )
        differences = np.concatenate([part.differences for part in parts], 1)
        return cls(outputs, slopes, differences, np.concatenate([p.rest for p in parts], 1))

    def of_heads(self) -> Float64[np.ndarray, "K B N"]:
        """The direct effect of every head, in the order of the attentions."""
        parts = []
        for attention, heads in self.outputs.items():
            weight = attention.output.per_head.detach()
            written = torch.einsum("bhe,hed->bhd", heads.to(weight), weight)
            parts.append(torch.einsum("kbd,bhd->kbh", self.slopes[attention].to(written), written))
        return torch.cat([part.double().cpu() for part in parts], -1).numpy()

    def by_chance(
        self, examples: slice
    ) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
        """The mean direct effect of each head over some examples if its weights were permuted.

        A head's effect is the sum over its part of the output projection times the slope of the
        difference by each weight. Over all orders of the weights it has this mean and this
        deviation.

        Source: Hoeffding 1951, theorem 2.
        """
        ends = []
        for attention, heads in self.outputs.items():
            weight = attention.output.per_head.detach().double().flatten(1)
            outputs, slopes = heads[examples].double(), self.slopes[attention][0, examples].double()
            by_weight = torch.einsum("bhe,bd->hed", outputs, slopes).flatten(1) / len(outputs)
            n = weight.shape[1]
            mean = n * weight.mean(1) * by_weight.mean(1)
            deviation = weight.std(1) * by_weight.std(1) * (n - 1) ** 0.5
            ends.append(torch.stack([mean, deviation]).cpu())
        mean, deviation = torch.cat(ends, 1).numpy()
        return mean, deviation


@dataclass
class _Pass:
    """What one forward pass meets on the direct way.

    Attributes:
        calls: How often each module was called.
        parts: What is added on the way: the call, the tensor by which its slope is taken, and what
            of it is written by no head.
        logits: What the unembedding returned at the positions; None without such a module.
    """

    calls: Counter[nn.Module] = field(default_factory=Counter)
    parts: list[tuple[Call, Tensor, Tensor]] = field(default_factory=list)
    logits: Tensor | None = None


class DirectWay:
    """The way from the outputs of heads to the logits, past all other layers.

    The model has to be in evaluation mode, with gradients enabled and none of its weights.

    Args:
        attentions: All attentions of the model, from `find_attentions`.
        example: One short example, by which the way is found.
    Raises:
        UnsupportedError: the model gives no logits for each token, or heads do not reach them by
            additions, norms and scalings alone.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[Attention], example: Batch) -> None:
        self._model, self._attentions = model, attentions
        self._mixing = {(a.output.module if a.called else a.module, a.nth): a for a in attentions}
        mixers, inside = {module for module, _ in self._mixing}, {a.module for a in attentions}
        self._holders = {
            module for module in model.modules() if mixers.intersection([*module.modules()][1:])
        }
        self._cut = [
            module
            for module in model.modules()
            if has_matrix(module) and (module not in self._holders or module in inside)
        ]
        self._on_way: set[Call] | None = None
        found = find_unembedding(model, dict(example.inputs))
        self._unembedding = None if found is None else found[0]
        with self._followed(example) as met:
            logits = example.logits(model(**example.inputs))
        slopes = torch.autograd.grad(
            logits.sum(), [tensor for _, tensor, _ in met.parts], allow_unused=True
        )
        parts = zip(met.parts, slopes, strict=True)
        self._on_way = {call for (call, _, _), slope in parts if slope is not None}
        for call, attention in self._mixing.items():
            if call not in self._on_way:
                raise UnsupportedError(
                    f"effects: what {attention.site} adds does not reach the logits of "
                    f"{type(model).__name__} by additions, norms and scalings alone, so its heads "
                    f"have no direct effect. {_INSTEAD}"
                )

    def written(self, batch: Batch, pairs: Sequence[Pairs]) -> Written:
        """What is written in each example, for each way to pair tokens.

        Raises:
            ArgumentError: logits are no numbers.
            UnsupportedError: what is added does not sum to the difference of logits.
        """
        outputs: dict[Attention, Tensor] = {}

        def note(attention: Attention, heads: Tensor) -> Tensor:
            index = batch.index(heads.flatten(2))
            if index is None:
                raise UnsupportedError(
                    f"effects: {attention.site} attends to {tuple(heads.shape[:2])} tokens of "
                    f"inputs of {tuple(batch.inputs['input_ids'].shape)}, so that it is unknown "
                    f"what its heads write for which. {_INSTEAD}"
                )
            outputs[attention] = heads.detach()[index]
            return heads

        with edit_heads(self._model, self._attentions, note), self._followed(batch) as met:
            final = batch.logits(self._model(**batch.inputs))
        logits = final if met.logits is None else met.logits
        scaled = self._rescaled(logits, final.detach())
        differences, rest, slopes = [], [], []
        for pair in pairs:
            differences.append(difference(final.detach().double(), pair).cpu().numpy())
            slope, of_rest = self._slopes(difference(scaled, pair).sum(), logits, met)
            slopes.append(slope)
            rest.append(of_rest)
        of_calls = {a: [slope[call] for slope in slopes] for call, a in self._mixing.items()}
        written = Written(
            {a: outputs[a] for a in self._attentions},
            {a: torch.stack(of_call) for a, of_call in of_calls.items()},
            np.stack(differences),
            np.stack(rest),
        )
        self._check_sum(written, final.dtype)
        return written

    def _slopes(
        self, target: Tensor, logits: Tensor, met: _Pass
    ) -> tuple[dict[Call, Tensor], Float64[np.ndarray, " B"]]:
        """How a sum of differences grows with each part, and what is written by no head."""
        bias = getattr(self._unembedding, "bias", None)
        added = [(logits, torch.zeros_like(logits) if bias is None else bias.expand_as(logits))]
        added += [(tensor, value) for _, tensor, value in met.parts]
        slopes = torch.autograd.grad(
            target, [tensor for tensor, _ in added], retain_graph=True, allow_unused=True
        )
        rest = np.zeros(len(logits))
        for (_, value), slope in zip(added, slopes, strict=True):
            if slope is not None:
                products = (slope.double() * value).flatten(1).sum(1).cpu().numpy()
                # Of tokens that stand in another order, only the sum of all examples is known.
                fits = len(products) == len(rest)
                rest += products if fits else products.sum() / len(rest)
        by_call = zip(met.parts, slopes[1:], strict=True)
        return {call: slope for (call, _, _), slope in by_call if slope is not None}, rest

    def _check_sum(self, written: Written, dtype: torch.dtype) -> None:
        heads = written.of_heads()
        gap = np.abs((heads.sum(-1) + written.rest - written.differences).sum(1))
        size = (np.abs(heads).sum(-1) + np.abs(written.rest) + np.abs(written.differences)).sum(1)
        if not (gap <= _TOLERANCE.get(dtype, _LOW_PRECISION) * size).all():
            raise UnsupportedError(
                f"effects: what the layers of {type(self._model).__name__} add does not sum to "
                f"its logits: {gap.max():.3g} of {size.max():.3g} is missing, so that heads have "
                f"no exact direct effect. {_INSTEAD}"
            )

    def _rescaled(self, logits: Tensor, final: Tensor) -> Float[Tensor, "B V"]:
        """The logits times what a softcap or a scale makes of each, held at its value."""
        unscaled = logits.detach()
        if not final.isfinite().all():
            raise ArgumentError(
                f"effects: {type(self._model).__name__} has logits that are NaN or infinite. Give "
                f"a model whose logits are numbers."
            )
        ratio = torch.where(unscaled == 0, 1.0, final / unscaled)
        if not (ratio > 0).all():
            raise UnsupportedError(
                f"effects: {type(self._model).__name__} adds to its logits after the unembedding "
                f"({int((ratio <= 0).sum())} of {ratio.numel()} change their sign), so that "
                f"heads have no exact direct effect. {_INSTEAD}"
            )
        return logits * ratio

    @contextmanager
    def _followed(self, batch: Batch) -> Iterator[_Pass]:
        """Let gradients follow the direct way alone while a batch runs."""
        met = _Pass()

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(_detached, args)), {k: _detached(x) for k, x in kwargs.items()}

        def call_of(module: nn.Module) -> Call | None:
            """This call of a module; None if it is known not to be on the way."""
            call = module, met.calls[module]
            met.calls[module] += 1
            return call if self._on_way is None or call in self._on_way else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            call = call_of(module)
            x = output[0] if isinstance(output, tuple) else output
            if call is None or not isinstance(x, Tensor) or not x.is_floating_point():
                return None
            # A gate, such as that of a shared expert, scales what is added.
            if x.shape[-1] == 1 and isinstance(output, Tensor):
                return x.detach()
            x, part = _with_leaf(x, batch)
            attention = self._mixing.get(call)
            met.parts.append((call, part, part.detach() if attention is None else _bias(attention)))
            return (x, *output[1:]) if isinstance(output, tuple) else x

        def keep_scale(module: nn.Module, args: Any, output: Any) -> Any:
            call = call_of(module)
            if call is None or len(args) > 1 or args[0].shape != output.shape:
                return None
            x, index = args[0], batch.index(output)
            if not x.requires_grad or index is None:
                return None
            added, constant = _linear(module, x[index], output[index].detach())
            met.parts.append((call, added, constant))
            output = output.detach()
            output[index] = added
            return output

        def unembed(module: nn.Module, args: Any, output: Any) -> None:
            met.logits = output[batch.index(output)]

        with Hooks() as hooks:
            for module in self._model.modules():
                if module is self._unembedding:
                    hooks.after(module, unembed)
                elif module in self._cut:
                    hooks.before(module, enter, with_kwargs=True)
                    if module not in self._holders:
                        hooks.after(module, leave)
                elif is_norm(module):
                    hooks.after(module, keep_scale)
            yield met


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _with_leaf(x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A tensor whose values at the positions are a leaf of their own: little to keep in memory.

    One that holds the tokens in another order is a leaf as a whole.
    """
    x = x.detach()
    B, T = batch.inputs["input_ids"].shape
    if x.shape[:2] == (1, T) and x.ndim == 3:  # positions, the same ones in all examples
        x = x.expand(B, -1, -1)
    x = x.contiguous()
    index = batch.index(x)
    if index is None:
        return x.requires_grad_(), x
    leaf = x[index].requires_grad_()
    x[index] = leaf
    return x, leaf


def _bias(attention: Attention) -> Tensor:
    bias = attention.output.bias
    return torch.zeros(()) if bias is None else bias


def _linear(
    norm: nn.Module, x: Float[Tensor, "B d_model"], y: Float[Tensor, "B d_model"]
) -> tuple[Float[Tensor, "B d_model"], Float[Tensor, " d_model"]]:
    """A norm's output as a linear function of its input, at the scale of this input; its bias."""
    gain, bias = gain_and_bias(norm, x)
    best = None
    for v in (x, x - x.mean(-1, keepdim=True)):
        scaled = v * gain
        fixed = scaled.detach()
        scale = ((y - bias) * fixed).sum(-1, keepdim=True) / fixed.square().sum(-1, keepdim=True)
        gap = float((y - bias - scale * fixed).norm())
        if best is None or gap < best[0]:
            best = gap, scaled * scale
    assert best is not None
    return y + (best[1] - best[1].detach()), bias


def difference(logits: Float[Tensor, "B V"], pairs: Pairs) -> Float[Tensor, " B"]:
    """The logit of the first token minus that of the second, or minus the mean of all."""
    pairs = pairs.to(logits.device)
    first, second = (logits.gather(1, pairs[:, [n]].clamp(min=0))[:, 0] for n in (0, 1))
    mean = logits.mean(-1)
    return torch.where(pairs[:, 0] == MEAN, mean, first) - torch.where(
        pairs[:, 1] == MEAN, mean, second
    )
