"""The weights of other attention layers, conversion to and from torch's own, and sharding."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn

from headwise._argument_names import LAYER, suggests
from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer._biases import PositionBias
from headwise.layer._core import HeadAttention, HeadNorm
from headwise.layer._layouts import check_state, translate
from headwise.layer._positions import RoPE
from headwise.layer._textbook import TextbookState

Layer = TypeVar("Layer", bound="ConvertibleLayer")


class ConvertibleLayer(nn.Module):
    """An attention layer that loads other layers' weights, converts to torch's and is sharded."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    kdim: int
    vdim: int
    rope: RoPE | None
    position_bias: PositionBias | None
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    attention: HeadAttention
    gate_proj: nn.Linear | None
    out_proj: nn.Module

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of this layer, or of another attention layer.

        The names of `nn.MultiheadAttention` (packed or not) and of the attention in transformers'
        BERT, GPT-2, Llama, T5 and similar models are translated, also when a larger model loads
        its state dict. Tensors saved beside the attention are left out: BERT's norm after it, and
        GPT-2's causal mask, called `bias` and `masked_bias`.

        Raises:
            ArgumentError: names are unknown or missing while `strict`, or two names mean the same
                tensor.
            ShapeError: a tensor has another shape.
            UnsupportedError: a tensor has no counterpart in this layer.
        """
        state = self._translate(state_dict)
        if strict:
            check_state(state, self.state_dict())
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        state = {name: state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        state_dict |= {prefix + name: x for name, x in self._translate(state).items()}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _translate(self, state: Mapping[str, Any]) -> dict[str, Any]:
        keys, values = (self.n_kv_heads * width for width in (self.head_dim, self.v_head_dim))
        return translate(state, (self.n_heads * self.head_dim, keys, values))

    @classmethod
    @suggests({other: ours for other, ours in LAYER.items() if ours == "n_heads="})
    def from_state_dict(
        cls: type[Layer], state_dict: Mapping[str, Any], n_heads: int, **options: Any
    ) -> Layer:
        """Make a layer from the weights of a textbook layer, and copy them.

        Names may be `W_q`, `W_Q`, `wq`, `W_query`, `q_proj`, `query`, `to_q` and their like, with
        biases `b_q`, `q_proj.bias` or none, and a common prefix such as `attn.`. A name that ends
        in `.weight` is an `nn.Linear` (out, in); a bare parameter is used as `x @ W` (in, out), or
        per head as (heads, in, width). Sizes, grouped kv heads and biases follow from the tensors;
        an absent bias beside others is zero. Causal masks among the buffers are left out.

        Args:
            state_dict: Tensors or arrays by name.
            n_heads: The number of query heads, which shapes alone do not show.
            options: Further arguments of the constructor, such as `rope` or `dropout`.
        Raises:
            ArgumentError: a name is unknown, missing or given twice, a value is not an array, or an
                option follows from the tensors.
            ShapeError: the shapes do not fit `n_heads` or each other.
        """
        state = TextbookState.of(state_dict)
        sizes = state.options(n_heads)
        if known := sorted(sizes.keys() & options.keys()):
            raise ArgumentError(
                f"from_state_dict: {known[0]}={options[known[0]]} follows from the tensors: "
                f"{sizes[known[0]]}. Leave it out."
            )
        weight = state.weights["q"]
        layer = _construct(cls, weight.shape[1], n_heads, **sizes, **options)
        layer.to(device=weight.device, dtype=weight.dtype)
        layer.load_state_dict(state.named())
        return layer

    @classmethod
    def from_torch(cls: type[Layer], module: nn.MultiheadAttention) -> Layer:
        """Convert an `nn.MultiheadAttention` to a layer of this class, copying its tensors.

        The layer takes `[batch, tokens, width]` whatever `module.batch_first` says, masks that
        are True where a query may attend, and returns weights per head. `add_zero_attn` becomes a
        constant sink of 0. Parameters that are frozen in `module` are frozen in the layer.

        Raises:
            ArgumentError: `module` is of another type, or the constructor of a subclass takes
                other arguments than `MultiHeadAttention`.
            UnsupportedError: the module has `add_bias_kv`.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise ArgumentError(
                f"from_torch: {type(module).__name__} is not an nn.MultiheadAttention. "
                f"Give one, or load the weights of another layer with load_state_dict."
            )
        if module.bias_k is not None:
            raise UnsupportedError(
                "from_torch: add_bias_kv=True adds a learned key and value to every text, which "
                "this layer does not have. Use the original layer, or train one without."
            )
        layer = _construct(
            cls,
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            kdim=module.kdim,
            vdim=module.vdim,
            # One more key of zeros has logit 0 and a value of 0: that is a sink.
            sinks=0.0 if module.add_zero_attn else None,
        )
        weight = module.out_proj.weight
        layer.to(device=weight.device, dtype=weight.dtype)
        layer.load_state_dict(module.state_dict())
        trained = {
            name: torch.tensor(x.requires_grad, device="cpu").expand(x.shape)
            for name, x in module.named_parameters()
        }
        for name, is_trained in layer._translate(trained).items():
            layer.get_parameter(name).requires_grad_(bool(is_trained.any()))
        return layer.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Convert this layer to an `nn.MultiheadAttention` (batch first), copying its tensors.

        Raises:
            UnsupportedError: the layer uses an option that `nn.MultiheadAttention` lacks.
        """
        sinks = self.attention.sinks
        constant = sinks is not None and not isinstance(sinks, nn.Parameter)
        has_zero_key = constant and not torch.as_tensor(sinks).any()
        _refuse("to_torch", "nn.MultiheadAttention has none", _beyond_torch(self, has_zero_key))
        weight = self.q_proj.weight
        module = nn.MultiheadAttention(
            self.d_model,
            self.n_heads,
            self.attention.dropout,
            bias=self.q_proj.bias is not None,
            add_zero_attn=has_zero_key,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=True,
            device=weight.device,
            dtype=weight.dtype,
        )
        state, ours = {}, dict(self.named_parameters())
        for name, theirs in module.named_parameters():
            if name.startswith("in_proj_"):
                kind = name.removeprefix("in_proj_")
                names = [f"{role}_proj.{kind}" for role in "qkv"]
            else:
                names = [name.replace("_proj_weight", "_proj.weight")]
            parts: list[torch.Tensor] = [ours[part] for part in names]
            state[name] = torch.cat(parts)
            theirs.requires_grad_(any(part.requires_grad for part in parts))
        module.load_state_dict(state)
        return module.train(self.training)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """The plan by which `torch.distributed.tensor.parallel.parallelize_module` shards heads.

        The number of devices must divide `n_kv_heads`.

        Raises:
            UnsupportedError: the layer has parameters that the plan cannot shard by head.
        """
        # Here, because importing it takes longer than importing all of this package.
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        whole = {
            "qk_norm": isinstance(self.q_norm, HeadNorm),
            "position_bias": self.position_bias is not None,
            "sinks": not isinstance(self.attention.sinks, float | None),
            "out_proj=False": isinstance(self.out_proj, nn.Identity),
        }
        _refuse("tensor_parallel_plan", "the plan cannot shard it", whole)
        columns = ["q_proj", "k_proj", "v_proj"] + ["gate_proj"] * (self.gate_proj is not None)
        return {name: ColwiseParallel() for name in columns} | {"out_proj": RowwiseParallel()}


def _construct(cls: type[Layer], *sizes: int, **options: Any) -> Layer:
    try:
        signature(cls).bind(*sizes, **options)
    except TypeError as error:
        raise ArgumentError(
            f"from_torch: the constructor of {cls.__name__} does not take the arguments of "
            f"MultiHeadAttention ({error}). Let it take *args and **kwargs and pass them on."
        ) from error
    return cls(*sizes, **options)


def _beyond_torch(layer: ConvertibleLayer, has_zero_key: bool) -> dict[str, bool]:
    core = layer.attention
    projections = [(name, x) for name, x in layer.named_children() if name.endswith("_proj")]
    unusual = {
        f"{name} of {type(x).__name__}": type(x) not in (nn.Linear, nn.Identity)
        for name, x in projections
    }
    biased = {x.bias is not None for _, x in projections if isinstance(x, nn.Linear)}
    return unusual | {
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
    names = [name for name, present in parts.items() if present]
    if names:
        raise UnsupportedError(
            f"{where}: the layer has {', '.join(names)}; {why}. Make the layer without."
        )
