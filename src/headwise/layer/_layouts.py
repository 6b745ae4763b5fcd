"""The names that others give to the tensors of an attention layer, read as ours.

nn.MultiheadAttention packs three projections into one tensor, or writes `q_proj_weight`; BERT
says `self.query`; GPT-2 packs too, and stores what it multiplies by (in, out) where `nn.Linear`
stores (out, in); Llama says `o_proj`; T5 has single letters.
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
# Saved beside the attention, but no part of it: BERT's norm, GPT-2's causal mask.
_BESIDE = ("output.LayerNorm.weight", "output.LayerNorm.bias", "bias", "masked_bias")


def translate(theirs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Tensor]:
    """The same tensors under our names; names that are ours, or unknown, stay as they are.

    Args:
        rows: How many rows of a packed tensor belong to queries, keys and values.
    Raises:
        UnsupportedError: there are `bias_k` and `bias_v`: a learned key that our layer lacks.
        ShapeError: a packed tensor has another number of rows.
        ArgumentError: two names are for the same tensor, or what they name is none.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name in _FURTHER_KEYS:
            raise UnsupportedError(
                f"MultiHeadAttention: {name} {tuple(tensor.shape)} is a further key and value for "
                f"every text, which this layer does not have. Use the original layer."
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
    """Refuse tensors with unknown names or other shapes, and missing ones, before any is copied.

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
        advice = "bias='qkv'" if biases == _INNER_BIASES else "the options of those tensors"
        raise ArgumentError(
            f"MultiHeadAttention.load_state_dict: unknown {unknown}, missing {missing}. "
            f"Make the layer with {advice}."
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
