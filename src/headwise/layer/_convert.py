"""To torch's own layer and back, and over several devices."""

from inspect import signature
from typing import Any

import torch
from torch import nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer._attention import Layer, MultiHeadAttention
from headwise.layer._core import HeadNorm


def from_torch(cls: type[Layer], module: nn.MultiheadAttention) -> Layer:
    """Make the layer that gives what `nn.MultiheadAttention` gives, with copies of its tensors."""
    if not isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(
            f"from_torch: {type(module).__name__} is no nn.MultiheadAttention. "
            f"Give one; tensors of others are read by load_state_dict."
        )
    if module.bias_k is not None:
        raise UnsupportedError(
            "from_torch: add_bias_kv=True is a further key and value for every text, which this "
            "layer does not have. Use the original layer, or train one without."
        )
    layer = _construct(
        cls,
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        kdim=module.kdim,
        vdim=module.vdim,
        # A further key of zeros has logit 0 and adds nothing: that is a sink.
        sinks=0.0 if module.add_zero_attn else None,
    )
    weight = module.out_proj.weight
    layer.to(device=weight.device, dtype=weight.dtype)
    layer.load_state_dict(module.state_dict())
    trained = {
        name: torch.tensor(x.requires_grad).expand(x.shape) for name, x in module.named_parameters()
    }
    for name, is_trained in layer._translate(trained).items():
        layer.get_parameter(name).requires_grad_(bool(is_trained.any()))
    return layer.train(module.training)


def _construct(cls: type[Layer], *sizes: int, **options: Any) -> Layer:
    try:
        signature(cls).bind(*sizes, **options)
    except TypeError as error:
        raise ArgumentError(
            f"from_torch: the constructor of {cls.__name__} does not take what that of "
            f"MultiHeadAttention takes ({error}). Let it take *args and **kwargs and hand them on."
        ) from error
    return cls(*sizes, **options)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """Make the `nn.MultiheadAttention` that gives what this layer gives."""
    sinks = layer.attention.sinks
    constant = sinks is not None and not isinstance(sinks, nn.Parameter)
    has_zero_key = constant and not torch.as_tensor(sinks).any()
    _refuse("to_torch", "nn.MultiheadAttention has none", _beyond_torch(layer, has_zero_key))
    weight = layer.q_proj.weight
    module = nn.MultiheadAttention(
        layer.d_model,
        layer.n_heads,
        layer.attention.dropout,
        bias=layer.q_proj.bias is not None,
        add_zero_attn=has_zero_key,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    state, ours = {}, dict(layer.named_parameters())
    for name, theirs in module.named_parameters():
        if name.startswith("in_proj_"):
            kind = name.removeprefix("in_proj_")
            names = [f"{role}_proj.{kind}" for role in "qkv"]
        else:
            names = [name.replace("_proj_weight", "_proj.weight")]
        parts: list[torch.Tensor] = [ours[own] for own in names]
        state[name] = torch.cat(parts)
        theirs.requires_grad_(any(part.requires_grad for part in parts))
    module.load_state_dict(state)
    return module.train(layer.training)


def tensor_parallel_plan(layer: MultiHeadAttention) -> dict[str, Any]:
    """Which projection is cut which way; every device then has some of the heads."""
    # Here, because importing it takes longer than importing all of this package.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    whole = {
        "qk_norm": isinstance(layer.q_norm, HeadNorm),
        "position_bias": layer.position_bias is not None,
        "sinks": not isinstance(layer.attention.sinks, float | None),
        "out_proj=False": isinstance(layer.out_proj, nn.Identity),
    }
    _refuse("tensor_parallel_plan", "the plan cannot cut it", whole)
    columns = ["q_proj", "k_proj", "v_proj"] + ["gate_proj"] * (layer.gate_proj is not None)
    return {name: ColwiseParallel() for name in columns} | {"out_proj": RowwiseParallel()}


def _beyond_torch(layer: MultiHeadAttention, has_zero_key: bool) -> dict[str, bool]:
    core = layer.attention
    projections = [(name, x) for name, x in layer.named_children() if name.endswith("_proj")]
    others = {
        f"{name} of {type(x).__name__}": type(x) not in (nn.Linear, nn.Identity)
        for name, x in projections
    }
    biased = {x.bias is not None for _, x in projections if isinstance(x, nn.Linear)}
    return others | {
        f"n_kv_heads={layer.n_kv_heads}": layer.n_kv_heads != layer.n_heads,
        f"head_dim={layer.head_dim}": layer.n_heads * layer.head_dim != layer.d_model,
        f"v_head_dim={layer.v_head_dim}": layer.v_head_dim != layer.head_dim,
        "bias='qkv'": len(biased) > 1,
        "qk_norm": isinstance(layer.q_norm, HeadNorm),
        "gate": layer.gate_proj is not None,
        "out_proj=False": isinstance(layer.out_proj, nn.Identity),
        f"rope={layer.rope}": layer.rope is not None,
        "position_bias": layer.position_bias is not None,
        f"scale={core.scale}": core.scale is not None,
        f"softcap={core.softcap}": core.softcap is not None,
        f"window={core.window}": core.window is not None,
        "sinks other than 0": core.sinks is not None and not has_zero_key,
    }


def _refuse(where: str, why: str, parts: dict[str, bool]) -> None:
    names = [name for name, there in parts.items() if there]
    if names:
        raise UnsupportedError(
            f"{where}: the layer has {', '.join(names)}; {why}. Make the layer without."
        )
