"""The output projection of every site, applied to the heads, gives the module's output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from headwise.capture import AttentionCall, capture_calls
from headwise.layer import MultiHeadAttention
from headwise.ownership import OutputProjection, output_projection

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
