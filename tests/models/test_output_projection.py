"""The output projection of every site, applied to the heads, gives the module's output."""

import pytest
import torch
import zoo
from torch import Tensor

import headwise as hw
from headwise.capture import AttentionCall, capture_calls
from headwise.ownership import OutputProjection, find_attentions

IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 8, 10, 3]])


def _mixed(call: AttentionCall, projection: OutputProjection) -> Tensor:
    out = torch.einsum("bhtv,hvd->btd", call.heads, projection.per_head)
    return out if projection.bias is None else out + projection.bias


@pytest.mark.parametrize("name", zoo.mixing())
def test_the_projection_gives_the_output_of_the_layer(name: str) -> None:
    model = zoo.make(name)
    for weight in model.parameters():  # biases are initialised with zeros
        if weight.ndim == 1:
            weight.data.normal_(0.5)
    projections = [attention.output for attention in find_attentions(model, {"input_ids": IDS})]
    outputs: list[Tensor] = []
    for module in {id(p.module): p.module for p in projections}.values():
        module.register_forward_hook(lambda module, args, out: outputs.append(out))
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture_calls(model, calls.append):
        model(input_ids=IDS)
    assert len(calls) == len(outputs) == len(projections) == 2
    for call, projection, out in zip(calls, projections, outputs, strict=True):
        torch.testing.assert_close(_mixed(call, projection), out, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), hw.observe(model, hw.Request(statistics=(), maps=True)) as watch:
        model(input_ids=IDS)
    for layer, call, projection in zip(watch.layers(), calls, projections, strict=True):
        shared = call.q.shape[1] // call.v.shape[1]
        for number, (_, written) in enumerate(layer.written()):
            expected = call.v[:, number // shared] @ projection.per_head[number]
            torch.testing.assert_close(written, expected)
        assert number == len(layer.heads) - 1
