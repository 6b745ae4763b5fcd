"""Gates on heads: 1 is the identity to the last bit, 0 removes; means are over tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from gates import gate_heads
from headwise import ablate
from headwise.errors import ArgumentError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.layer import MultiHeadAttention
from headwise.ownership import find_attentions, heads_of
from oracles import first_tensor, modules_of, padded

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(3))


def _batch(model: nn.Module) -> dict[str, Tensor]:
    batch = padded(TEXTS, "right")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _torch_encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def _mini() -> nn.Module:
    return MiniGPT(MiniGPTConfig(13, 8, 12, 4, 2, 2)).eval()


Made = Callable[[], tuple[nn.Module, Any]]
BARE: dict[str, Made] = {
    "ours": lambda: (MultiHeadAttention(12, 4, 2), (X,)),
    "ours, gated": lambda: (MultiHeadAttention(12, 4, gate=True), (X,)),
    "ours, cross": lambda: (MultiHeadAttention(12, 4, kdim=6), (X, X[..., :6])),
    "mini": lambda: (_mini(), (torch.tensor([[1, 5, 3], [7, 2, 2]]),)),
    "torch": lambda: (nn.MultiheadAttention(12, 4, batch_first=True), (X, X, X)),
    "torch, T first": lambda: (nn.MultiheadAttention(12, 4, kdim=6), (X, X[..., :6], X)),
    "torch, one text": lambda: (nn.MultiheadAttention(12, 4), (X[0], X[0], X[0])),
    "torch encoder": lambda: (_torch_encoder(), (X,)),
}


def _made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name in BARE:
        model, args = BARE[name]()
        for bias in model.parameters():  # biases of zeros prove nothing
            if bias.ndim == 1:
                nn.init.normal_(bias)
        return model, args, {}
    model = zoo.make(name)
    return model, (), _batch(model)


@pytest.fixture
def ordinary() -> Any:
    """Torch's own layers outside their private fast path, to which they are equal under gates."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("name", [*BARE, *zoo.mixing()])
def test_a_gate_of_one_is_the_identity_and_zero_removes_the_head(name: str) -> None:
    model, args, kwargs = _made(name)
    before = modules_of(model)
    attentions = find_attentions(model)
    H = attentions[0].site.n_heads
    with torch.no_grad():
        plain = first_tensor(model(*args, **kwargs))
        with gate_heads(model, attentions, lambda _: torch.ones(H)):
            assert torch.equal(first_tensor(model(*args, **kwargs)), plain)
        gates = torch.ones(H)
        gates[[0, 2]] = 0
        with gate_heads(model, attentions, lambda _: gates):
            gated = first_tensor(model(*args, **kwargs))
        with ablate(model, [head for head in heads_of(attentions) if head.head in (0, 2)]):
            ablated = first_tensor(model(*args, **kwargs))
        assert modules_of(model) == before
        assert torch.equal(first_tensor(model(*args, **kwargs)), plain)
        for attention in attentions:
            attention.output.per_head[[0, 2]] = 0
        without = first_tensor(model(*args, **kwargs))
    assert torch.equal(gated, ablated)
    torch.testing.assert_close(gated, without, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(gated, plain, atol=1e-3)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("name", ["ours", "mini", "torch", "torch, T first", "torch encoder"])
def test_gates_for_each_text_give_each_text_its_gradient(name: str) -> None:
    model, args, _ = _made(name)
    model, args = model.double(), [x.double() if x.is_floating_point() else x for x in args]
    axis = 1 if name == "torch, T first" else 0
    attentions = find_attentions(model)
    B = args[0].shape[axis]

    def loss(gates: Tensor, inputs: list[Tensor]) -> Tensor:
        with gate_heads(
            model, attentions, lambda attention: gates[..., attentions.index(attention), :]
        ):
            return first_tensor(model(*inputs)).square().sum()

    together = torch.full((B, len(attentions), 4), 0.5, dtype=torch.float64, requires_grad=True)
    loss(together, args).backward()
    for text in range(B):
        alone = torch.full((len(attentions), 4), 0.5, dtype=torch.float64)
        inputs = [x.narrow(axis, text, 1) for x in args]
        for attention in range(len(attentions)):
            for head in range(4):
                step = torch.zeros_like(alone)
                step[attention, head] = 1e-5
                slope = (loss(alone + step, inputs) - loss(alone - step, inputs)) / 2e-5
                torch.testing.assert_close(
                    together.grad[text, attention, head], slope, rtol=1e-6, atol=1e-7
                )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "Albert"])
def test_means_are_over_tokens_and_not_over_padding(name: str, side: str) -> None:
    model = zoo.make(name)
    batches = [padded(TEXTS[:2], side), padded(TEXTS[2:], side)]
    attentions = find_attentions(model)
    captured: list[Tensor] = []
    hook = attentions[1].output.module.register_forward_pre_hook(
        lambda m, args: captured.append(args[0])
    )
    with torch.no_grad():
        for text in TEXTS:
            model(input_ids=torch.tensor([text]))
    hook.remove()
    every = 2 if name == "Albert" else 1  # one module for both layers
    tokens = torch.cat([x[0] for x in captured[every - 1 :: every]])
    expected = tokens.unflatten(-1, (4, -1)).mean(0)[1]
    inputs: list[Tensor] = []
    with torch.no_grad(), ablate(model, "L1.H1", "mean", batches) as ablation:
        hook = attentions[1].output.module.register_forward_pre_hook(
            lambda m, a: inputs.append(a[0])
        )
        model(**batches[0])
    hook.remove()
    heads = inputs[-1].unflatten(-1, (4, -1))
    torch.testing.assert_close(heads[:, :, 1], expected.expand_as(heads[:, :, 1]))
    assert (ablation.mode, ablation.mean_of) == ("mean", "reference")


def test_without_a_reference_the_mean_is_that_of_each_batch() -> None:
    model = zoo.make("Llama")
    batch = _batch(model)
    with torch.no_grad():
        with ablate(model, [(0, 3), (1, 0)], "mean") as ablation:
            by_batch = model(**batch)[0]
        with ablate(model, [(0, 3)], "mean", [batch]):
            first = model(**batch)[0]
        with ablate(model, [(0, 3)], "mean"):
            torch.testing.assert_close(model(**batch)[0], first)
    assert ablation.mean_of == "batch"
    assert [str(head) for head in ablation.heads] == ["L0.H3", "L1.H0"]
    assert not torch.allclose(by_batch, first)


@pytest.mark.parametrize("make", ["ours", "mini"])
@torch.no_grad()
def test_heads_can_be_ablated_in_steps(make: str) -> None:
    model, batch = BARE[make]()
    layer = 0 if make == "ours" else 1
    with ablate(model, [(0, 1), (layer, 2)]):
        expected = model(*batch)
    with ablate(model, (0, 1)), ablate(model, (layer, 2)):
        assert torch.equal(model(*batch), expected)


def test_layers_with_shared_weights_are_ablated_separately() -> None:
    model = zoo.make("Albert")
    batch = _batch(model)
    answers = {}
    with torch.no_grad():
        for heads in ("L0.H1", "L1.H1"):
            with ablate(model, heads):
                answers[heads] = [model(**batch)[0] for _ in range(2)]
        with ablate(model, [(0, 1), (1, 1)]):
            ablated = model(**batch)[0]
        find_attentions(model)[0].output.per_head[1] = 0
        torch.testing.assert_close(ablated, model(**batch)[0])
    first, second = answers.values()
    assert torch.equal(*first)  # the order starts again in each pass
    assert torch.equal(*second)
    assert not torch.allclose(first[0], second[0])


def _stop(*_: object) -> None:
    raise RuntimeError("stop")


def _run_and_stop(model: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    handle = module.register_forward_hook(_stop)
    try:
        model(*args, **kwargs)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["ours", "torch", "torch encoder", "Bert"])
def test_an_exception_leaves_nothing_behind(name: str) -> None:
    model, args, kwargs = _made(name)
    fast = torch.backends.mha.get_fastpath_enabled()
    module, before = find_attentions(model)[0].module, modules_of(model)
    with pytest.raises(RuntimeError, match="stop"), ablate(model, (0, 1)):
        _run_and_stop(model, module, *args, **kwargs)
    assert modules_of(model) == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    # Finding the heads runs the model on an example input, which fails, too.
    handle = module.register_forward_hook(_stop)
    before = modules_of(model)
    with pytest.raises(ArgumentError, match=r"does not run on a made-up input .*: stop"):
        ablate(model, (0, 1)).__enter__()
    assert modules_of(model) == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    handle.remove()
