"""Multi-head attention as a module that calls its projections and its core as sub-modules."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._display import type_of
from headwise._torch_private import under_autocast
from headwise.errors import ArgumentError, ShapeError, UnsupportedError
from headwise.kernels import MaskLike
from headwise.layer._core import HeadAttention, HeadNorm, KVCache, LayerOutput
from headwise.layer._positions import ALiBi, RoPE
from headwise.layer._textbook import read_textbook
from headwise.shapes import is_size

Layer = TypeVar("Layer", bound="MultiHeadAttention")


class MultiHeadAttention(nn.Module):
    """Multi-head self- and cross-attention, with grouped key/value heads.

    Each head has its own queries. Groups of heads share `n_kv_heads` key/value heads (1 is
    multi-query attention): query head `h` reads kv head `h // (n_heads // n_kv_heads)`. The
    projections are ordinary `nn.Linear` modules and are called as modules, so adapters,
    quantization and hooks work on them.

    Queries are aligned with the end of the keys, as in `headwise.masks`, and positions follow
    that alignment. Windows, softcaps and sinks are options of `headwise.attend`.

    Args:
        d_model: Width of the query input and of the output.
        n_heads: Number of query heads.
        n_kv_heads: Number of key/value heads. None is `n_heads`.
        head_dim: Width of a query or key. None is `d_model / n_heads`.
        v_head_dim: Width of a value. None is `head_dim`.
        bias: Whether the projections have biases. "qkv" gives biases to the query, key and value
            projections only, as in Qwen2.
        dropout: Share of attention weights dropped in training.
        kdim: Width of the key input. None is `d_model`.
        vdim: Width of the value input. None is `kdim`.
        qk_norm: Whether each query and key is RMS-normalized, with learned factors, before the
            rotation.
        gate: Whether each head's output is multiplied by a sigmoid gate computed from the query
            input.
        rope: Rotates queries and keys by their positions.
        position_bias: A bias on the logits by the distance of query and key.
    Raises:
        ShapeError: `d_model` is not a multiple of `n_heads` and `head_dim` is None, `n_heads` is
            not a multiple of `n_kv_heads`, or a part was made for other sizes.
        ArgumentError: a size is not positive, or a value is out of range.
    Source:
        Vaswani et al. 2017, §3.2.2 (arXiv:1706.03762); grouped heads: Ainslie et al. 2023
        (arXiv:2305.13245); normed queries and keys: Henry et al. 2020 (arXiv:2010.04245);
        gate: Qiu et al. 2025, head-wise after attention (arXiv:2505.06708).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        bias: bool | Literal["qkv"] = False,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        rope: RoPE | None = None,
        position_bias: ALiBi | None = None,
    ) -> None:
        super().__init__()
        sizes = _read_sizes(d_model, n_heads, n_kv_heads, head_dim, v_head_dim, kdim, vdim)
        self.d_model, self.n_heads, self.n_kv_heads, *widths = sizes
        self.head_dim, self.v_head_dim, self.kdim, self.vdim = widths
        _check_positions(n_heads, self.head_dim, rope, position_bias)
        if bias not in (True, False, "qkv"):
            raise ArgumentError(f"MultiHeadAttention: bias={bias!r}. Give True, False or 'qkv'.")
        inner, outer = bool(bias), bias not in (False, "qkv")
        self.rope, self.position_bias = rope, position_bias
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=inner)
        self.k_proj = nn.Linear(self.kdim, self.n_kv_heads * self.head_dim, bias=inner)
        self.v_proj = nn.Linear(self.vdim, self.n_kv_heads * self.v_head_dim, bias=inner)
        self.q_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.attention = HeadAttention(dropout)
        self.gate_proj = nn.Linear(d_model, n_heads, bias=outer) if gate else None
        self.out_proj = nn.Linear(n_heads * self.v_head_dim, d_model, bias=outer)

    def forward(
        self,
        query: Float[Tensor, "B T d_model"],
        key: Float[Tensor, "B S kdim"] | None = None,
        value: Float[Tensor, "B S vdim"] | None = None,
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "B T d_model"] | LayerOutput:
        """Attend from `query` to `key` and mix `value`.

        Args:
            key: The input of the key projection. None is `query` itself: self-attention.
            value: The input of the value projection. None is `key`.
            mask: As in `headwise.attend`: True = may attend. With a cache, its keys are all
                tokens so far, those of this call included.
            causal: Whether a query sees only its own position and earlier ones.
            cache: The keys and values of earlier tokens. Those of `query` are added to it.
            need_weights: Whether to return the weights of every head.
        Returns:
            The output; with `need_weights` a pair of output and weights before dropout.
            A forward hook on `attention` then finds the kernel, and why it was chosen, in the
            `choice` of that module's output.
        Raises:
            ShapeError: an input has another width than the layer's, or another batch than the
                cache.
            ArgumentError: dtypes or devices differ, or a cache is used in cross-attention.
        """
        if cache is not None:
            _check_cache(cache, reads_itself=key is None and value is None)
        key = query if key is None else key
        value = key if value is None else value
        widths = self.d_model, self.kdim, self.vdim
        _check_inputs({"query": query, "key": key, "value": value}, widths, self.q_proj)
        q = self.q_norm(_split(self.q_proj(query), self.head_dim))
        k = self.k_norm(_split(self.k_proj(key), self.head_dim))
        v = _split(self.v_proj(value), self.v_head_dim)
        if self.rope is not None:
            q, k = self._rotated(self.rope, q, k, 0 if cache is None else len(cache))
        if cache is not None:
            k, v = cache.joined(k, v)
        bias = None if self.position_bias is None else self.position_bias.bias(q.dtype)
        options = {"mask": mask, "causal": causal, "bias": bias}
        if need_weights:
            heads, weights, *_ = self.attention(q, k, v, **options, need_weights=True)
            output: Any = LayerOutput(self._join(heads, query), weights)
        else:
            output = self._join(self.attention(q, k, v, **options), query)
        if cache is not None:
            cache.store(k, v)  # last, so that a call that fails changes nothing
        return output

    @staticmethod
    def _rotated(rope: RoPE, q: Tensor, k: Tensor, n_cached: int) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated by their positions: the last query is at the last key."""
        T, S = q.shape[2], k.shape[2]
        of_keys = rope.cos_sin(torch.arange(n_cached, n_cached + S, device=k.device), k.dtype)
        of_queries = of_keys
        if T != S:
            of_queries = rope.cos_sin(torch.arange(S - T, S, device=q.device), q.dtype)
        return rope.rotate(q, of_queries), rope.rotate(k, of_keys)

    def _join(self, heads: Tensor, query: Tensor) -> Tensor:
        heads = heads.transpose(1, 2)  # B T H Dv
        if self.gate_proj is not None:
            heads = heads * self.gate_proj(query).sigmoid().unsqueeze(-1)
        return self.out_proj(heads.flatten(2))

    @classmethod
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
        sizes, state = read_textbook(state_dict, n_heads)
        if known := sorted(sizes.keys() & options.keys()):
            raise ArgumentError(
                f"from_state_dict: {known[0]}={options[known[0]]} follows from the tensors: "
                f"{sizes[known[0]]}. Leave it out."
            )
        layer = cls(sizes.pop("d_model"), n_heads, **sizes, **options)
        weight = state["q_proj.weight"]
        layer.to(device=weight.device, dtype=weight.dtype)
        layer.load_state_dict(state)
        return layer

    @classmethod
    def from_torch(cls: type[Layer], module: nn.MultiheadAttention) -> Layer:
        """Convert an `nn.MultiheadAttention` to a layer of this class, copying its tensors.

        The layer takes `[batch, tokens, width]` whatever `module.batch_first` says, masks that
        are True where a query may attend, and returns weights per head. Parameters that are
        frozen in `module` are frozen in the layer.

        Raises:
            ArgumentError: `module` is of another type.
            UnsupportedError: the module has `add_bias_kv` or `add_zero_attn`.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise ArgumentError(
                f"from_torch: {type(module).__name__} is not an nn.MultiheadAttention. "
                f"Give one, or the weights of another layer to from_state_dict."
            )
        if module.bias_k is not None or module.add_zero_attn:
            option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
            raise UnsupportedError(
                f"from_torch: {option}=True adds a key and value to every text, which this layer "
                f"does not have. Use the original layer, or train one without."
            )
        layer = cls(
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            kdim=module.kdim,
            vdim=module.vdim,
        )
        weight = module.out_proj.weight
        layer.to(device=weight.device, dtype=weight.dtype)
        for name, theirs in module.named_parameters():
            # Torch keeps those of queries, keys and values in one tensor, if they have one width.
            is_packed = name.startswith("in_proj_")
            kind = name.removeprefix("in_proj_")
            names = [f"{role}_proj.{kind}" for role in "qkv"] if is_packed else [name]
            for part_name, part in zip(names, theirs.detach().chunk(len(names)), strict=True):
                ours = layer.get_parameter(part_name.replace("_proj_weight", "_proj.weight"))
                ours.requires_grad_(False).copy_(part).requires_grad_(theirs.requires_grad)
        return layer.train(module.training)

    def extra_repr(self) -> str:
        names = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "rope")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _split(x: Float[Tensor, "B T joined"], width: int) -> Float[Tensor, "B H T width"]:
    # The number of heads follows from `x`: under tensor parallelism it holds a part of them.
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)


_SIZES = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "kdim", "vdim")


def _read_sizes(d_model: int, n_heads: int, *optional: int | None) -> tuple[int, ...]:
    """Resolve the default sizes; refuse sizes that are not positive or do not divide."""
    for name, size in zip(_SIZES, (d_model, n_heads, *optional), strict=True):
        if size is not None and not is_size(size):
            raise ArgumentError(
                f"MultiHeadAttention: {name}={size!r}. Give a positive whole number."
            )
    n_kv_heads, head_dim, v_head_dim, kdim, vdim = optional
    if head_dim is None and d_model % n_heads:
        raise ShapeError(
            f"MultiHeadAttention: d_model={d_model} cannot be shared by n_heads={n_heads} "
            f"evenly. Make it a multiple, or give head_dim."
        )
    if n_heads % (n_kv_heads or n_heads):
        raise ShapeError(
            f"MultiHeadAttention: n_heads={n_heads} cannot share n_kv_heads={n_kv_heads} "
            f"evenly. Make n_heads a multiple of n_kv_heads."
        )
    head_dim, kdim = head_dim or d_model // n_heads, kdim or d_model
    widths = head_dim, v_head_dim or head_dim, kdim, vdim or kdim
    return d_model, n_heads, n_kv_heads or n_heads, *widths


def _check_positions(
    n_heads: int, head_dim: int, rope: RoPE | None, position_bias: ALiBi | None
) -> None:
    """Refuse positions of the wrong type or made for other sizes."""
    if not isinstance(rope, RoPE | None):
        raise ArgumentError(
            f"MultiHeadAttention: rope={rope!r} is not a RoPE. Give RoPE(head_dim), or None."
        )
    if not isinstance(position_bias, ALiBi | None):
        raise ArgumentError(
            f"MultiHeadAttention: position_bias={position_bias!r} is not an ALiBi. "
            f"Give ALiBi(n_heads), or None."
        )
    if rope is not None and rope.width > head_dim:
        raise ShapeError(
            f"MultiHeadAttention: rope rotates {rope.width} features of heads with "
            f"head_dim={head_dim}. Give RoPE a width up to {head_dim}."
        )
    if position_bias is not None and position_bias.n_heads != n_heads:
        raise ShapeError(
            f"MultiHeadAttention: position_bias is for {position_bias.n_heads} heads where "
            f"n_heads={n_heads}. Make it for {n_heads}."
        )


def _check_inputs(inputs: Mapping[str, Tensor], widths: Sequence[int], like: nn.Module) -> None:
    """Refuse inputs whose width, dtype or device differs from the layer's."""
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"MultiHeadAttention: {name} is {type_of(x)}. Give a tensor of floats."
            )
        if x.ndim != 3 or x.shape[-1] != width:
            raise ShapeError(
                f"MultiHeadAttention: {name} {tuple(x.shape)}. "
                f"Give [batch, tokens, {width}]; the layer was made for that width."
            )
    kinds = {name: (x.dtype, x.device) for name, x in inputs.items()}
    # Adapters and quantized weights accept dtypes of their own; autocast unifies dtypes.
    if type(like) is nn.Linear:
        kinds["weights"] = (like.weight.dtype, like.weight.device)
    if under_autocast(inputs["query"]):
        kinds = {name: (torch.get_default_dtype(), device) for name, (_, device) in kinds.items()}
    if len(set(kinds.values())) > 1:
        descriptions = ", ".join(
            f"{name} {dtype} on {device}" for name, (dtype, device) in kinds.items()
        )
        raise ArgumentError(
            f"MultiHeadAttention: {descriptions}. Bring them to one dtype and device."
        )


def _check_cache(cache: KVCache, reads_itself: bool) -> None:
    """Refuse a cache of another type, or one in cross-attention."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(
            f"MultiHeadAttention: cache={cache!r} is not a KVCache. Give one, or None."
        )
    if not reads_itself:
        raise ArgumentError(
            "MultiHeadAttention: cache given together with key or value. "
            "A cache is for self-attention: give query alone."
        )
