"""The output projection of every site, applied to the heads, gives the module's output."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from headwise.layer import MultiHeadAttention
from headwise.models import (
    AttentionCall,
    capture_calls,
)
from headwise.models.ownership import (
    OutputProjection,
    output_projection,
)

IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 8, 10, 3]])


def _captured_projections(
    model: nn.Module, run: Callable[[], Any]
) -> list[tuple[AttentionCall, OutputProjection | None]]:
    captured = []

    def record(call: AttentionCall) -> None:
        captured.append((call, output_projection(model, running.site_of(call))))

    with torch.no_grad(), capture_calls(model, record) as running:
        run()
    return captured


def _mixed(call: AttentionCall, projection: OutputProjection) -> Tensor:
    out = torch.einsum("bhtv,hvd->btd", call.heads, projection.per_head)
    return out if projection.bias is None else out + projection.bias


def _projected(module: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, ...]:
    return (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, -1)


@pytest.mark.parametrize("name", zoo.mixing())
def test_the_projection_gives_the_output_of_the_layer(name: str) -> None:
    model = zoo.make(name)
    for weight in model.parameters():  # biases are initialised with zeros
        if weight.ndim == 1:
            weight.data.normal_(0.5)
    outputs = []
    projections = [
        p for _, p in _captured_projections(model, lambda: model(input_ids=IDS)) if p is not None
    ]
    assert len(projections) == 2
    for module in {id(p.module): p.module for p in projections}.values():
        module.register_forward_hook(lambda module, args, out: outputs.append(out))
    captured = _captured_projections(model, lambda: model(input_ids=IDS))
    assert len(captured) == len(outputs) == 2
    for (call, projection), out in zip(captured, outputs, strict=True):
        torch.testing.assert_close(_mixed(call, projection), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_projection_of_our_layer(kv_heads: int) -> None:
    layer = MultiHeadAttention(12, 4, kv_heads, v_head_dim=5, bias=True)
    x = torch.randn(2, 5, 12)
    [(call, projection)] = _captured_projections(layer, lambda: layer(x))
    assert (projection.name, projection.per_head.shape) == ("out_proj", (4, 5, 12))
    torch.testing.assert_close(_mixed(call, projection), layer(x))


def test_the_projection_of_the_layer_of_torch() -> None:
    module = nn.MultiheadAttention(12, 4, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(2, 5, 12)
    [(call, projection)] = _captured_projections(module, lambda: module(x, x, x))
    q, k, v = (part.unflatten(-1, (4, 3)).transpose(1, 2) for part in _projected(module, x))
    heads = nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(_mixed(replace(call, heads=heads), projection), module(x, x, x)[0])


def test_writing_into_the_projection_changes_the_model() -> None:
    model = zoo.make("GPT2")
    [(_, first), _] = _captured_projections(model, lambda: model(input_ids=IDS))
    with torch.no_grad():
        first.per_head[2].zero_()
    weight = model.transformer.h[0].attn.c_proj.weight
    assert (weight[12:18] == 0).all()
    assert (weight[:12] != 0).any()


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # in peft
def test_an_adapter_has_no_plain_projection() -> None:
    model = zoo.make("Llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
    captured = _captured_projections(adapted, lambda: adapted(input_ids=IDS))
    assert [projection for _, projection in captured] == [None, None]


def test_a_layer_without_an_output_projection_has_none() -> None:
    layer = MultiHeadAttention(12, 4, out_proj=False)
    [(_, projection)] = _captured_projections(layer, lambda: layer(torch.randn(2, 5, 12)))
    assert projection is None
