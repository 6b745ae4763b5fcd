"""Models under `torch.compile` and `torch.export`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from jaxtyping import config
from torch import Tensor, nn

import headwise as hw
from headwise.errors import UnsupportedError

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler cannot trace through the checks of annotations.
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    torch._dynamo.reset()


class CompiledLayer(nn.Module):
    """One that the compiler is quick to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).flatten(2))


def _graphs() -> tuple[list[int], Callable[..., Any]]:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    return compiled, backend


def _in_place(model: nn.Module, backend: Callable[..., Any]) -> nn.Module:
    model.compile(backend=backend)
    return model


HOW: dict[str, Callable[[nn.Module, Callable[..., Any]], nn.Module]] = {
    "a wrapper": lambda model, backend: torch.compile(model, backend=backend),
    "in place": _in_place,
}


@pytest.mark.full
@pytest.mark.parametrize("how", HOW)
def test_a_compiled_model_is_watched_and_ablated_like_the_plain_one(how: str) -> None:
    layer = CompiledLayer().eval()
    with hw.observe(layer) as watch:
        plain = layer(X)
    expected = watch.table()
    with hw.ablate(layer, "L0.H1", reference=[X]):
        without = layer(X)
    compiled, backend = _graphs()
    model = HOW[how](layer, backend)
    torch.testing.assert_close(model(X), plain)
    before = len(compiled)
    assert before >= 1
    with hw.observe(model) as watch:
        assert torch.equal(model(X), plain)
    table = watch.table()
    assert table.frame().equals(expected.frame())
    assert table.model == expected.model
    for given in (layer, model):  # whichever is named, the compiled one runs without the head
        with hw.ablate(given, "L0.H1", reference=[X]):
            assert torch.equal(model(X), without)
    torch.testing.assert_close(model(X), plain)
    assert len(compiled) == before  # what was compiled before is used again


@pytest.mark.full
def test_verbs_take_a_compiled_model_for_the_one_in_it() -> None:
    layer = hw.MultiHeadAttention(8, 4).eval()
    model = torch.compile(layer, backend="eager")  # never called, so never compiled
    small = hw.prune(model, "L0.H1")
    assert isinstance(small, hw.MultiHeadAttention)
    assert torch.equal(small(X), hw.prune(layer, "L0.H1")(X))
    assert str(hw.costs(model)) == str(hw.costs(layer))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean((1, 2))

    scores, expected = (hw.importance(m, [{"query": X}], loss=loss) for m in (model, layer))
    assert scores.importance.tolist() == expected.importance.tolist()
    assert scores.model == expected.model


@pytest.mark.full
def test_a_compiled_model_is_saved_as_the_one_in_it(tmp_path: Any) -> None:
    layer = hw.MultiHeadAttention(8, 4).eval()
    hw.save(torch.compile(layer, backend="eager"), tmp_path / "saved")
    assert torch.equal(hw.load(tmp_path / "saved")(X), layer(X))


def _bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=9)).eval()


EXPORTED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "ours": (lambda: hw.MultiHeadAttention(8, 2).eval(), (X,)),
    "torch": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (X,)),
    "Hugging Face": (_bert, (torch.tensor([[3, 4, 5]]),)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", EXPORTED)
def test_a_watched_model_is_not_exported(kind: str) -> None:
    make, inputs = EXPORTED[kind]
    model = make()
    message = r"export: \w+ cannot be exported while its heads are watched or edited"
    with hw.observe(model) as watch:
        with pytest.raises(UnsupportedError, match=message):
            torch.export.export(model, inputs, strict=False)
        model(*inputs)
    assert set(watch.table().count("lse")) == {inputs[0].shape[0] * inputs[0].shape[1]}
    with (
        hw.ablate(model, "L0.H0", reference=[inputs]),
        pytest.raises(UnsupportedError, match=message),
    ):
        torch.export.export(model, inputs, strict=False)
    assert torch.export.export(model, inputs, strict=False) is not None
