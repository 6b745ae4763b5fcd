"""Translates the state dicts of other attention layers to the names of this one.

`nn.MultiheadAttention` packs three projections into one tensor, or names them `q_proj_weight`;
BERT uses `self.query`; GPT-2 packs too, and stores its weights transposed, as (in, out) where
`nn.Linear` has (out, in); Llama uses `o_proj`; T5 uses single letters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError, UnsupportedError

_MODULES = {
    "self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj",
    "output.dense": "out_proj",
    "o_proj": "out_proj",
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj",
    "relative_attention_bias": "position_bias.buckets",
    "c_proj": "out_proj",
}  # fmt: skip
_TENSORS = {f"{role}_proj_weight": f"{role}_proj.weight" for role in "qkv"} | {
    "sinks": "attention.sinks"
}
_PACKED = ("in_proj_weight", "in_proj_bias", "c_attn.weight", "c_attn.bias")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight")
_INNER_BIASES = {f"{role}_proj.bias" for role in "qkv"}
_FURTHER_KEYS = ("bias_k", "bias_v")
# Saved beside the attention but no part of it: BERT's norm, GPT-2's causal mask.
_BESIDE = ("output.LayerNorm.weight", "output.LayerNorm.bias", "bias", "masked_bias")


def translate(theirs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Tensor]:
    """The same tensors under our names. Our own names, and unknown ones, stay as they are.

    Args:
        rows: The numbers of rows of a packed tensor that belong to queries, keys and values.
    Raises:
        UnsupportedError: there are `bias_k` and `bias_v`, a learned key that our layer lacks.
        ShapeError: a packed tensor has another number of rows.
        ArgumentError: two names mean the same tensor, or a value is not a tensor.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name in _FURTHER_KEYS:
            raise UnsupportedError(
                f"MultiHeadAttention: {name} {tuple(tensor.shape)} is a learned key or value, "
                f"which this layer does not have. Use the original layer."
            )
        if name in _BESIDE:
            continue
        if not isinstance(tensor, Tensor) and not name.endswith("_extra_state"):
            raise ArgumentError(
                f"MultiHeadAttention: {name} is of type {type(tensor).__name__}. Give tensors."
            )
        tensor = tensor.T if name in _TRANSPOSED else tensor
        named = _unpack(name, tensor, rows) if name in _PACKED else {_rename(name): tensor}
        if twice := sorted(ours.keys() & named.keys()):
            raise ArgumentError(
                f"MultiHeadAttention: {name} gives {', '.join(twice)} for the second time. "
                f"Leave out one of them."
            )
        ours |= named
    return ours


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse unknown names, missing names and other shapes before any tensor is copied.

    Raises:
        ArgumentError: names are unknown or missing.
        ShapeError: a tensor has another shape.
    """
    unknown, missing = (
        sorted(state.keys() - expected.keys()),
        sorted(expected.keys() - state.keys()),
    )
    if unknown or missing:
        biases = {name for name in state if name.endswith("_proj.bias")}
        options = "bias='qkv'" if biases == _INNER_BIASES else "the options of those tensors"
        advice = f"Make the layer with {options}."
        if {*missing} >= {"q_proj.weight", "k_proj.weight", "v_proj.weight"}:
            advice = "MultiHeadAttention.from_state_dict(state, n_heads) reads textbooks' names."
        raise ArgumentError(
            f"MultiHeadAttention.load_state_dict: unknown {unknown}, missing {missing}. {advice}"
        )
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ShapeError(
                f"MultiHeadAttention.load_state_dict: {name} {tuple(tensor.shape)} where the "
                f"layer has {tuple(expected[name].shape)}. Make the layer with the same sizes."
            )


def _rename(name: str) -> str:
    module, _, tensor = name.rpartition(".")
    return f"{_MODULES[module]}.{tensor}" if module in _MODULES else _TENSORS.get(name, name)


def _unpack(name: str, packed: Tensor, rows: Sequence[int]) -> dict[str, Tensor]:
    if len(packed) != sum(rows):
        raise ShapeError(
            f"MultiHeadAttention: {name} has {len(packed)} rows for queries, keys and values "
            f"where the layer has {' + '.join(map(str, rows))}. Make it with the same sizes."
        )
    kind = name.removeprefix("in_proj_").removeprefix("c_attn.")
    parts = zip("qkv", torch.split(packed, list(rows)), strict=True)
    return {f"{role}_proj.{kind}": part for role, part in parts}
