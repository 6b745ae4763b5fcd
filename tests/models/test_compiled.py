"""Models under `torch.compile` and `torch.export`."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from small_attention import SmallAttention
from tiers import tiers

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def _step(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A training step but for its backward pass."""
    return lambda x: model(x).square().sum()


# What is given to `observe`, and the step that calls it, by how the model is compiled.
HOW: dict[str, Callable[[nn.Module, Any], tuple[nn.Module, Callable[[Tensor], Tensor]]]] = {
    "a wrapper": lambda model, how: (wrapper := how(model), _step(wrapper)),
    "in place": lambda model, how: (model.compile(**how.keywords) or model, _step(model)),
    "layers": lambda model, how: (_compile_layers(model, how), _step(model)),
    "forward": lambda model, how: (_replace_forward(model, how), _step(model)),
    "a function": lambda model, how: (model, how(_step(model))),
    "a whole function": lambda model, how: (model, how(_step(model), fullgraph=True)),
}


def _compile_layers(model: nn.Module, how: Any) -> nn.Module:
    for layer in model.children():
        layer.compile(**how.keywords)
    return model


def _replace_forward(model: nn.Module, how: Any) -> nn.Module:
    model.forward = how(model.forward)
    return model


def _loss(output: Tensor, _: Any) -> Tensor:
    return output.square().mean((1, 2))


@pytest.mark.parametrize("how", tiers(["a function"], HOW))
def test_what_is_compiled_is_watched_as_the_plain_model(how: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def results(model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Any]:
        """What each verb that captures calls says of the model, and gradients of a watched step."""
        weights = [*model.parameters()]
        with hw.observe(model) as watch:
            loss = step(X)
        table = watch.table()
        with hw.ablate(model, "L1.H2", reference=[X]):
            without = step(X)
        with hw.HeadMonitor(model, every=1) as monitor:
            step(X)
            scalars = monitor.step()
        maps = hw.attentions(model, (X,))
        importance = hw.importance(model, [{"input": X}], loss=_loss).importance.tolist()
        gradients = torch.autograd.grad(loss, weights)
        frame = table.frame()
        return [loss, without, *gradients, *maps, frame, scalars, importance, table.model]

    plain = nn.Sequential(SmallAttention(8), SmallAttention(8, by_hand=True))
    expected = results(plain, _step(plain))
    model, step = HOW[how](deepcopy(plain), partial(torch.compile, backend=backend))
    for _ in range(2):  # compiled first within a watch, and before it
        _assert_equal(results(model, step), expected)
        assert not counters["graph_break"]
        compiled = len(graphs)
        with torch.no_grad():
            torch.testing.assert_close(step(X), expected[0])
    assert 1 <= compiled == len(graphs)  # what was compiled before is used again


def _assert_equal(results: list[Any], expected: list[Any]) -> None:
    for x, y in zip(results, expected, strict=True):
        if isinstance(y, Tensor):
            assert torch.equal(x, y)
        else:
            assert x.equals(y) if hasattr(y, "equals") else x == y


@pytest.mark.full
def test_a_block_within_a_compiled_function_is_not_compiled() -> None:
    model = SmallAttention(8)

    def watched(x: Tensor) -> Any:
        with hw.observe(model) as watch:
            return model(x), watch

    out, watch = torch.compile(watched, backend="eager")(X)
    assert torch.equal(out, model(X))
    assert set(watch.table().count("lse")) == {10}
    assert counters["stats"]["unique_graphs"] == 0
    assert counters["frames"]["total"] < 50  # 199 if it looked into all of ours
    torch._dynamo.reset()
    with pytest.raises(Exception, match="watch or edit heads outside of what is compiled"):
        torch.compile(watched, backend="eager", fullgraph=True)(X)


_LATER = """
import sys, torch
import headwise as hw

layer, x = hw.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
with hw.observe(layer) as watch:
    finders = len(sys.meta_path)
    assert "torch._dynamo" not in sys.modules
    torch.compile(lambda x: layer(x).sum(), backend="eager", fullgraph=True)(x).backward()
assert len(sys.meta_path) == finders - 1
assert set(watch.table().count("lse")) == {5}
assert not torch._dynamo.utils.counters
assert torch.compiler.set_stance("default").prev.stance == "default"
"""


@pytest.mark.full
def test_a_compiler_that_is_imported_within_a_watch_compiles_nothing_there() -> None:
    subprocess.run([sys.executable, "-c", _LATER], check=True)


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
    model, ids = MiniGPT(MiniGPTConfig(13, 8, 12, 4)).eval(), torch.tensor([[1, 5, 3]])
    hw.save(torch.compile(model, backend="eager"), tmp_path / "saved")
    assert torch.equal(hw.load(tmp_path / "saved")(ids), model(ids))


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
