"""Conversion from and to torch's layer keeps every number, name and mode."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.layer import MultiHeadAttention

B, T, S, D_MODEL = 2, 5, 7, 12

options = st.fixed_dictionaries(
    {
        "num_heads": st.sampled_from([1, 3, 4]),
        "bias": st.booleans(),
        "kdim": st.sampled_from([None, 11]),
        "vdim": st.sampled_from([None, 13]),
        "add_zero_attn": st.booleans(),
        "batch_first": st.booleans(),
    }
)


def _theirs(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(D_MODEL, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _inputs(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    widths = (T, D_MODEL), (S, module.kdim), (S, module.vdim)
    return tuple(torch.randn(B, *shape, dtype=torch.float64) for shape in widths)


def _run(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], **options: Any
) -> tuple[Any, Any]:
    """Call torch's layer batch first, and drop the weight of the added zero key."""
    if module.batch_first:
        out, weights = module(*inputs, average_attn_weights=False, **options)
    else:
        turned = (x.transpose(0, 1) for x in inputs)
        out, weights = module(*turned, average_attn_weights=False, **options)
        out = out.transpose(0, 1)
    return out, weights[..., :S]


@given(config=options)
def test_a_layer_converted_from_torch_gives_the_same_output(config: dict[str, Any]) -> None:
    theirs = _theirs(**config)
    inputs = _inputs(theirs)
    out, weights = _run(theirs, inputs)
    output = MultiHeadAttention.from_torch(theirs)(*inputs, need_weights=True)
    torch.testing.assert_close(output.out, out)
    torch.testing.assert_close(output.weights, weights)


@given(config=options)
def test_converting_to_torch_and_back_loses_no_bit(config: dict[str, Any]) -> None:
    theirs = _theirs(**config)
    back = MultiHeadAttention.from_torch(theirs).to_torch()
    assert back.batch_first
    assert back.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    inputs = _inputs(theirs)
    torch.testing.assert_close(_run(back, inputs)[0], _run(theirs, inputs)[0])


def test_masks_of_torch_are_the_inverse_of_ours() -> None:
    theirs = _theirs(num_heads=3)
    inputs = _inputs(theirs)
    blocked = torch.rand(T, S) < 0.3
    padding = torch.arange(S) >= torch.tensor([[S], [4]])
    out, _ = _run(theirs, inputs, attn_mask=blocked, key_padding_mask=padding)
    visible = ~(blocked | padding[:, None, None])  # B 1 T S
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(*inputs, mask=visible), out)


def test_dtype_mode_and_dropout_are_converted() -> None:
    theirs = nn.MultiheadAttention(D_MODEL, 3, dropout=0.25, dtype=torch.bfloat16).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.attention.dropout, ours.training) == (0.25, False)
    assert ours.q_proj.weight.dtype == torch.bfloat16
    back = ours.train().to_torch()
    assert (back.dropout, back.training, back.out_proj.weight.dtype) == (0.25, True, torch.bfloat16)


@given(config=options, frozen=st.sets(st.integers(0, 5)))
def test_frozen_parameters_stay_frozen(config: dict[str, Any], frozen: set[int]) -> None:
    theirs = _theirs(**config)
    for index, parameter in enumerate(theirs.parameters()):
        parameter.requires_grad_(index not in frozen)
    ours = MultiHeadAttention.from_torch(theirs)
    packed = theirs.in_proj_weight
    for role in "qkv":
        source = getattr(theirs, f"{role}_proj_weight") if packed is None else packed
        assert getattr(ours, f"{role}_proj").weight.requires_grad == source.requires_grad
    assert ours.out_proj.weight.requires_grad == theirs.out_proj.weight.requires_grad
    trained = {name: tensor.requires_grad for name, tensor in theirs.named_parameters()}
    back = ours.to_torch().named_parameters()
    assert {name: tensor.requires_grad for name, tensor in back} == trained


@pytest.mark.parametrize("config", [{}, {"kdim": 11, "vdim": 13}], ids=["packed", "unpacked"])
def test_a_larger_model_loads_a_state_with_torch_names(config: dict[str, int]) -> None:
    theirs = nn.ModuleDict({"a": nn.ModuleDict({"attention": _theirs(num_heads=3, **config)})})
    ours = MultiHeadAttention(D_MODEL, 3, bias=True, **config).double()
    model = nn.ModuleDict({"a": nn.ModuleDict({"attention": ours})})
    model.load_state_dict(theirs.state_dict())
    inputs = _inputs(theirs["a"]["attention"])
    torch.testing.assert_close(ours(*inputs), _run(theirs["a"]["attention"], inputs)[0])


def test_packed_tensors_are_split_by_the_sizes_of_grouped_heads() -> None:
    packed = torch.randn(12 + 3 + 2, D_MODEL)
    layer = MultiHeadAttention(D_MODEL, 4, 1, v_head_dim=2)
    layer.load_state_dict({"in_proj_weight": packed, "out_proj.weight": torch.ones(D_MODEL, 8)})
    weights = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    assert torch.equal(weights, packed)


def test_a_partial_state_loads_with_strict_false() -> None:
    layer = MultiHeadAttention(D_MODEL, 3)
    keys = layer.load_state_dict({"q_proj_weight": torch.ones(12, 12)}, strict=False)
    assert layer.q_proj.weight.detach().eq(1).all()
    assert keys.missing_keys == ["k_proj.weight", "v_proj.weight", "out_proj.weight"]


class _Named(MultiHeadAttention):
    """A subclass with the arguments of its base."""

    def __init__(self, *args: Any, name: str = "mine", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


@given(config=options)
def test_a_subclass_makes_layers_of_its_own_class(config: dict[str, Any]) -> None:
    theirs = _theirs(**config)
    layer = _Named.from_torch(theirs)
    assert type(layer) is _Named
    assert layer.name == "mine"
    base = MultiHeadAttention.from_torch(theirs)
    assert type(base) is MultiHeadAttention
    inputs = _inputs(theirs)
    assert torch.equal(layer(*inputs), base(*inputs))


def test_pruning_keeps_the_subclass() -> None:
    layer = _Named(D_MODEL, 4, name="kept")
    layer.q_proj.eval()
    small = hw.prune(layer, [(0, 1)])
    assert type(small) is _Named
    assert small.name == "kept"
    modes = {name: module.training for name, module in layer.named_modules()}
    assert {name: module.training for name, module in small.named_modules()} == modes
