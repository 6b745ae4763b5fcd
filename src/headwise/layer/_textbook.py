"""The state dicts of textbook layers, under the names of our layer.

They have `W_q`, `W_Q`, `W_query`, `q_proj`, `to_q` and their like: a name that ends in `.weight` is
that of an `nn.Linear`, stored as (out, in). A bare parameter is used as `x @ W`, so it is stored as
(in, out), or per head as (heads, in, width).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError

_WORDS = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
    "out": ("o", "out", "output"),
}
_FORMS = ("{}", "w{}", "w_{}", "{}_proj", "{}_linear", "linear_{}", "to_{}", "fc_{}", "{}_weight")
_BIAS_FORMS = ("b{}", "b_{}", "{}_bias")
_WEIGHTS = {
    form.format(word): role for role, words in _WORDS.items() for word in words for form in _FORMS
} | dict.fromkeys(("fc", "proj", "dense", "to_out.0"), "out")
_BIASES = {
    form.format(word): role
    for role, words in _WORDS.items()
    for word in words
    for form in _BIAS_FORMS
}
# Causal masks that textbook layers save as buffers.
_BUFFERS = frozenset(("mask", "tril", "causal_mask", "masked_bias"))


def read_textbook(
    state: Mapping[str, Any], n_heads: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the state dict of a textbook layer.

    Returns:
        The arguments of our layer that follow from the shapes, besides `n_heads`, and the tensors
        under its names, as `nn.Linear` stores them. Absent biases are zeros if others exist.
    Raises:
        ArgumentError: a name is unknown or means the same tensor as another, a value is no
            array, or a projection is missing.
        ShapeError: a tensor has another number of axes, or the shapes do not fit so many heads.
    """
    weights: dict[str, Tensor] = {}  # by role: q, k, v, out
    biases: dict[str, Tensor] = {}
    prefix = _common_prefix(state)
    for name, value in state.items():
        bare = name.removeprefix(prefix).lower()
        if bare in _BUFFERS:
            continue
        module, _, kind = bare.rpartition(".")
        is_linear = kind in ("weight", "bias") and module in _WEIGHTS
        is_bias = kind == "bias" if is_linear else bare in _BIASES
        place = module if is_linear else bare
        role = _WEIGHTS.get(place) or _BIASES.get(place)
        if role is None:
            raise ArgumentError(
                f"from_state_dict: {name} is not a weight or bias of a textbook layer. Rename it "
                f"to W_q, W_k, W_v, W_o or b_q, b_k, b_v, b_o, or leave it out."
            )
        tensors = biases if is_bias else weights
        if role in tensors:
            raise ArgumentError(
                f"from_state_dict: {name} gives the {'bias' if is_bias else 'weight'} of "
                f"{role!r} for the second time. Leave out one of them."
            )
        tensor = _tensor(name, value)
        tensors[role] = tensor.flatten() if is_bias else _as_linear(name, tensor, role, is_linear)
    if missing := [role for role in ("q", "k", "v", "out") if role not in weights]:
        raise ArgumentError(
            f"from_state_dict: no weights of {', '.join(missing)} among {sorted(state)}. "
            f"Give W_q, W_k, W_v and W_o, or q_proj.weight and so on."
        )
    ours = {f"{role}_proj.weight": weight for role, weight in weights.items()}
    for role, weight in weights.items() if biases else ():
        if role != "out" or role in biases:
            ours[f"{role}_proj.bias"] = biases.get(role, weight.new_zeros(len(weight)))
    return _options(weights, biases, n_heads), ours


def _options(
    weights: Mapping[str, Tensor], biases: Mapping[str, Tensor], n_heads: int
) -> dict[str, Any]:
    """The arguments of our layer that fit these shapes."""
    rows = {role: len(weight) for role, weight in weights.items()}
    head_dim, rest = divmod(rows["q"], n_heads)
    n_kv_heads, kv_rest = divmod(rows["k"], head_dim) if head_dim else (0, 0)
    if rest or kv_rest or not n_kv_heads or n_heads % n_kv_heads or rows["v"] % n_kv_heads:
        raise ShapeError(
            f"from_state_dict: n_heads={n_heads} does not fit queries, keys and values of "
            f"widths {rows['q']}, {rows['k']} and {rows['v']}. Give the number of query heads."
        )
    return {
        "d_model": weights["q"].shape[1],
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": rows["v"] // n_kv_heads,
        "kdim": weights["k"].shape[1],
        "vdim": weights["v"].shape[1],
        "bias": "qkv" if biases and "out" not in biases else bool(biases),
    }


def _common_prefix(state: Mapping[str, Any]) -> str:
    """The module path that all names share, such as `attn.`."""
    paths = [name.removesuffix(".weight").removesuffix(".bias").split(".")[:-1] for name in state]
    shared = paths[0] if paths else []
    # `to_out.0` is one name: its path is that of its siblings.
    paths = [path[:-1] if path and path[-1].lower() == "to_out" else path for path in paths]
    while shared and any(path[: len(shared)] != shared for path in paths):
        shared = shared[:-1]
    return "".join(f"{part}." for part in shared)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"from_state_dict: {name} is of type {type(value).__name__}. Give tensors or arrays."
        ) from error


def _as_linear(name: str, tensor: Tensor, role: str, linear: bool) -> Tensor:
    """A weight as [out, in]."""
    if tensor.ndim == 3 and not linear:  # per head: H, in, width; of the output H, width, out
        return tensor.flatten(0, 1).T if role == "out" else tensor.transpose(1, 2).flatten(0, 1)
    if tensor.ndim != 2:
        raise ShapeError(
            f"from_state_dict: {name} has the shape {tuple(tensor.shape)}. Give a matrix, or one "
            f"per head as [heads, in, width]."
        )
    return tensor if linear else tensor.T
