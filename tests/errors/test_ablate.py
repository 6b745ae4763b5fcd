"""Heads that cannot be ablated are refused by name, and the model is unchanged."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from folders import tiny_llama
from gates import gate_heads
from headwise import ablate
from headwise.errors import ArgumentError, HeadError, HeadwiseError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.ownership import find_attentions
from headwise.tables import Head, Scores
from oracles import modules_of

X = torch.randn(2, 5, 12)
SCORES = Scores((Head("", 0, 0),), np.zeros(1, int), np.ones((1, 1)))


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(12, 4)

    def forward(self, spectrum: Tensor) -> Tensor:
        return self.layer(spectrum)


LAYER = MultiHeadAttention(12, 4)


@pytest.mark.parametrize(("model", "heads", "mode", "kind", "message"), [
    (LAYER, (0, 4), "zero", HeadError, r"no head \(0, 4\).*There are 4, from L0.H0 to L0.H3"),
    (LAYER, "L1.H0", "zero", HeadError, "no head L1.H0"),
    (LAYER, ["L0.H1", (0, 1)], "zero", HeadError, "L0.H1 is named twice"),
    (LAYER, "H3", "zero", HeadError, "'H3' names no head"),
    (LAYER, 3, "zero", HeadError, "3 names no heads"),
    (LAYER, SCORES, "zero", HeadError, "Scores of 1 heads choose none. Give hw.plan"),
    (LAYER, [3], "zero", HeadError, "3 names no head"),
    (LAYER, {0: 1}, "zero", HeadError, r"\{0: 1\} names no heads"),
    (LAYER, (0, 1), "median", ArgumentError, "mode='median'"),
    (nn.ReLU(), (0, 0), "zero", ArgumentError, "ReLU has no weights"),
    (_Own(), (0, 1), "zero", ArgumentError, r"inputs of _Own .*\(spectrum\)"),
])  # fmt: skip
def test_what_cannot_be_ablated(
    model: nn.Module, heads: Any, mode: Any, kind: type[HeadwiseError], message: str
) -> None:
    before = modules_of(model)
    with pytest.raises(kind, match=message):
        ablate(model, heads, mode).__enter__()
    assert modules_of(model) == before


def test_inputs_that_cannot_be_made_up_can_be_given() -> None:
    assert len(find_attentions(_Own(), X)) == 1


class _Odd(nn.Module):
    """Heads of width 3, and what it does with them under names of its own."""

    def __init__(self, blend: nn.Module, n_heads: int = 4) -> None:
        super().__init__()
        self.read, self.blend, self.n_heads = nn.Linear(12, 9 * n_heads), blend, n_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.read(x).unflatten(-1, (3, self.n_heads, 3)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.blend(heads.transpose(1, 2).flatten(2))


class _Beside(nn.Module):
    """Adds what it makes of its input to what its linear layer makes of it, as adapters do."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.base, self.more = nn.Linear(12, 12), nn.ModuleDict(more)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + sum((part(x) for part in self.more.values()), 0.1 * x)


Change = Callable[[Tensor], Tensor]  # of heads, B T H Dv


class _Wrapped(nn.Module):
    """A linear layer behind changes of the heads."""

    def __init__(self, *changes: Change, n_heads: int = 4) -> None:
        super().__init__()
        self.changes, self.n_heads = changes, n_heads
        self.beside, self.mix = (nn.Linear(3 * n_heads, 3 * n_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.beside(torch.ones_like(x)).sigmoid()  # a linear layer that reads no head
        heads = x.unflatten(-1, (self.n_heads, -1))
        for change in self.changes:
            heads = change(heads)
        return torch.tanh(self.mix(gate * heads.flatten(-2))) + 1.0


SEPARATE: tuple[Change, ...] = (
    lambda x: 3 * x,
    lambda x: x + 1,
    lambda x: nn.functional.rms_norm(x, x.shape[-1:]),
    lambda x: x * x.mean(-1, keepdim=True).sigmoid(),
    lambda x: x.relu() + 0.1 * x,
    lambda x: x * torch.arange(1.0, 1 + x.shape[-2])[:, None],
    lambda x: x.flip(-1),
    lambda x: x.cumsum(1),
    lambda x: torch.where(x.sum(-1, keepdim=True) > 0, x, -x),
)
MIXING: tuple[Change, ...] = (
    lambda x: x.roll(1, -2),
    lambda x: x.flatten(-2).roll(1, -1).view(x.shape),
    lambda x: nn.functional.rms_norm(x.flatten(-2), [x[0, 0].numel()]).view(x.shape),
    lambda x: x.softmax(-2),
    lambda x: x * x.amax(-2, keepdim=True).sigmoid(),
    lambda x: x.mT.reshape(x.shape),
    lambda x: torch.where(x[..., :1, :1] > x[..., 1:2, :1], x, x.flip(-1)),
    lambda x: x + torch.cat([0 * x[..., :1, :], x[..., :-1, :]], -2),
    lambda x: torch.cat([x[..., :-1, :], x[..., -1:, :] * x[..., :1, :].detach()], -2),
)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 110), marks=pytest.mark.full)])
def test_heads_reach_their_projection_slice_by_slice_or_are_refused(seeds: range) -> None:
    """Random changes of heads before their projection: every other one mixes heads."""
    for seed in seeds:
        torch.manual_seed(seed)
        draw, mixes = Random(seed), bool(seed % 2)
        n_heads, changes = draw.randint(2, 6), draw.choices(SEPARATE, k=draw.randint(1, 3))
        if mixes:
            changes.insert(draw.randint(0, len(changes)), draw.choice(MIXING))
        model = nn.Sequential(_Odd(_Wrapped(*changes, n_heads=n_heads), n_heads))
        [attention] = find_attentions(model, X, needs_projections=False)
        assert (attention.projection is None) == mixes
        if not mixes:
            with ablate(model, "L0.H1", reference=[X]):
                ablated = model(X)
            attention.output.per_head.data[1] = 0
            torch.testing.assert_close(model(X), ablated)


class _Bare(nn.Module):
    """Multiplies heads by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _Packed(nn.Linear):
    """Weights of half the width, with scales, as of a quantized layer."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.weight = nn.Parameter(self.weight[:, :6].detach())
        self.register_buffer("scales", torch.zeros(3, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("blend", "name"),
    [
        (nn.Linear(12, 7), "0.blend"),
        (nn.Sequential(nn.Dropout(0.1), nn.Linear(12, 12), nn.ReLU()), "0.blend.1"),
        (nn.Sequential(nn.Flatten(0, 1), nn.Linear(12, 12)), "0.blend.1"),
    ],
)
def test_the_output_projection_is_the_linear_layer_that_receives_the_heads(
    blend: nn.Module, name: str
) -> None:
    model = nn.Sequential(_Odd(blend)).eval()
    assert find_attentions(model, X)[0].output.name == name
    with ablate(model, "L0.H1", reference=[X]):
        ablated = model(X)
    with torch.no_grad():
        linear = model.get_submodule(name)
        linear.weight[:, 3:6] = 0
    torch.testing.assert_close(model(X), ablated)


def _unmixed() -> nn.Module:
    layer = MultiHeadAttention(12, 4)
    layer.out_proj = nn.Identity()
    return layer


def _adapted(config: peft.PeftConfig) -> nn.Module:
    return peft.get_peft_model(tiny_llama(vocab_size=23), config)


NO_PROJECTION = "has no output projection of its own that is a plain linear layer: .*"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "found"), [
    (lambda: nn.Sequential(nn.Linear(12, 3)), "no attention was captured in Sequential"),
    (_unmixed, NO_PROJECTION + r"its heads go into out_proj \(Identity\)\. W"),
    (lambda: _Odd(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12))),
     NO_PROJECTION + r"on their way into blend\.1"),
    (lambda: _Odd(_Wrapped(lambda x: x.roll(1, -2))),
     NO_PROJECTION + r"mixed or moved on their way into blend\.mix"),
    (lambda: _Odd(_Beside()),
     NO_PROJECTION + r"its heads do not go into blend\.base \(Linear\) alone: .* twice\. W"),
    (lambda: _Odd(_Bare()),
     f"heads: the model {NO_PROJECTION}" r"its heads go into blend \(_Bare\)\. Watch"),
    (lambda: _Odd(_Beside(a=nn.Linear(12, 12))),
     NO_PROJECTION + r"blend\.base \(Linear\) and blend\.more\.a \(Linear"),
    (lambda: _Odd(_Packed()),
     NO_PROJECTION + r"into blend \(_Packed\)\. Its weights are packed: unpack them first"),
    (lambda: _adapted(peft.LoraConfig(target_modules=["o_proj"])),
     r"o_proj, an adapter \(lora\)\. Merge it"),
    (lambda: _adapted(peft.VeraConfig(target_modules=["o_proj"])),
     r"o_proj, an adapter \(vera\)\. Merge it"),
    (lambda: _adapted(peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=3,
                                                task_type="CAUSAL_LM")),
     r"heads and those of .*layers\.1\.self_attn go into .*self_attn\.model\.o_proj\. Watch"),
])  # fmt: skip
def test_heads_without_a_plain_output_projection(make: Callable[[], nn.Module], found: str) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match=found):
        find_attentions(model, None if isinstance(model, peft.PeftModel) else X)


class _Twice(nn.Module):
    """One layer used twice, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
        return x


def test_shared_layers_with_gradient_checkpointing() -> None:
    model = _Twice()
    attentions = find_attentions(model, X)
    gates = torch.ones(4)
    with gate_heads(model, attentions, lambda _: gates):
        loss = model(X.clone().requires_grad_()).sum()
        with pytest.raises(UnsupportedError, match=r"layer\.attention is shared by 2 layers"):
            loss.backward()
