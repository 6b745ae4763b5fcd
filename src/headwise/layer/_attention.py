"""Multi-head attention as a module that calls its projections and its core as sub-modules."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._torch_private import under_autocast
from headwise.errors import ArgumentError, ShapeError, UnsupportedError
from headwise.kernels import Bias, MaskLike, TensorBias, WindowLike
from headwise.layer._cache import CachedKeys, KVCache
from headwise.layer._core import HeadAttention, HeadNorm, LayerOutput, LayerOutputWithLse
from headwise.layer._positions import ALiBi, PositionedBias, RoPE
from headwise.layer._state import check_state, read_textbook, translate
from headwise.masks import Mask, as_mask
from headwise.masks.parts import split_additive
from headwise.shapes import is_size

Layer = TypeVar("Layer", bound="MultiHeadAttention")


class MultiHeadAttention(nn.Module):
    """Multi-head self- and cross-attention, with grouped key/value heads.

    Each head has its own queries. Groups of heads share `n_kv_heads` key/value heads (1 is
    multi-query attention): query head `h` reads kv head `h // (n_heads // n_kv_heads)`. The
    projections are ordinary `nn.Linear` modules and are called as modules, so adapters,
    quantization and hooks work on them.

    Queries are aligned with the end of the keys, as in `headwise.masks`, and positions follow
    that alignment.

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
        out_proj: Whether an output projection mixes the heads. Without it the heads are
            concatenated.
        rope: Rotates queries and keys by their positions.
        position_bias: A bias on the logits by the distance of query and key.
        scale: The factor on `q · k`. None is `1 / sqrt(head_dim)`.
        softcap: Logits become `softcap · tanh(logits / softcap)`.
        window: How many keys are visible on each side of a query besides its own, `(left, right)`.
            A cache's `window=n` counts the query's own too, and may not be the shorter one.
        sinks: One more logit per head, in the softmax denominator only. An `nn.Parameter` is
            learned; a tensor, or one number for all heads, stays constant.
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
        out_proj: bool = True,
        rope: RoPE | None = None,
        position_bias: ALiBi | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: WindowLike | None = None,
        sinks: Float[Tensor, " H"] | float | None = None,
    ) -> None:
        super().__init__()
        sizes = _read_sizes(d_model, n_heads, n_kv_heads, head_dim, v_head_dim, kdim, vdim)
        self.d_model, self.n_heads, self.n_kv_heads, *widths = sizes
        self.head_dim, self.v_head_dim, self.kdim, self.vdim = widths
        _check_parts(n_heads, self.head_dim, rope, position_bias, sinks)
        inner, outer = _read_bias(bias)
        self.rope, self.position_bias = rope, position_bias
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=inner)
        self.k_proj = nn.Linear(self.kdim, self.n_kv_heads * self.head_dim, bias=inner)
        self.v_proj = nn.Linear(self.vdim, self.n_kv_heads * self.v_head_dim, bias=inner)
        self.q_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.attention = HeadAttention(
            dropout, scale=scale, softcap=softcap, window=window, sinks=sinks
        )
        self.gate_proj = nn.Linear(d_model, n_heads, bias=outer) if gate else None
        joined = n_heads * self.v_head_dim
        self.out_proj = nn.Linear(joined, d_model, bias=outer) if out_proj else nn.Identity()

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
        need_lse: bool = False,
    ) -> Float[Tensor, "B T d_out"] | LayerOutput | LayerOutputWithLse:
        """Attend from `query` to `key` and mix `value`.

        Args:
            key: The input of the key projection. None is `query` itself: self-attention.
            value: The input of the value projection. None is `key`.
            mask: As in `headwise.attend`: True = may attend. With a cache, its keys are the
                slots in use, those of this call included.
            causal: Whether a query sees only its own position and earlier ones.
            cache: The keys and values of earlier tokens. Those of `query` are added to it.
            need_weights: Whether to return the weights of every head.
            need_lse: Whether to return the log-sum-exp of every head.
        Returns:
            The output. With `need_weights` a pair of output and weights before dropout; with
            `need_lse` a triple of output, weights (None without `need_weights`) and log-sum-exps.
            A forward hook on `attention` then finds the kernel, and why it was chosen, in the
            `choice` of that module's output.
        Raises:
            ShapeError: an input has another width than the layer's, or the cache is full.
            ArgumentError: dtypes or devices differ, a cache is used in cross-attention, it keeps
                sinks that the layer's own window hides, or it forgets keys within that window.
        """
        if cache is not None:
            _check_cache(cache, self.attention.window, reads_itself=key is None and value is None)
        key = query if key is None else key
        value = key if value is None else value
        widths = self.d_model, self.kdim, self.vdim
        _check_inputs({"query": query, "key": key, "value": value}, widths, self.q_proj)
        q = self.q_norm(self._split(self.q_proj(query), self.head_dim))
        k = self.k_norm(self._split(self.k_proj(key), self.head_dim))
        v = self._split(self.v_proj(value), self.v_head_dim)
        q, k, v, mask, bias, slots = self._kernel_inputs(q, k, v, mask, cache)
        extras_of = {"need_weights": need_weights, "need_lse": need_lse}
        result = self.attention(q, k, v, mask=mask, bias=bias, causal=causal, **extras_of)
        extras = need_weights or need_lse
        out = self._join(result.heads if extras else result, query)
        if cache is not None and slots is not None:
            cache.keep(slots)  # last, so that a call that fails changes nothing
        if not extras:
            return out
        if need_lse:
            return LayerOutputWithLse(out, result.weights, result.lse)
        return LayerOutput(out, result.weights)

    def _kernel_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, MaskLike | None, Bias | None, CachedKeys | None]:
        """Rotated queries and keys, joined with the cache, the masks and biases of both, and the
        slots of the cache, which stores them once the call has succeeded."""
        if cache is None and self.rope is None and self.position_bias is None:
            return q, k, v, mask, None, None
        if cache is not None:
            cache.check(k, v)
        query_at, key_at = _positions(q, k, cache)
        if self.rope is not None:
            cos_sin = self.rope.cos_sin(query_at, q.dtype)
            q = self.rope.rotate_by(q, cos_sin)
            k = self.rope.rotate_by(
                k, cos_sin if key_at is query_at else self.rope.cos_sin(key_at, k.dtype)
            )
        bias: Bias | None = None
        slots: CachedKeys | None = None
        if cache is not None:
            slots = cache.join(k, v)
            k, v, key_at = slots
            mask, bias = _combine(mask, cache.visible(slots, query_at))
        if self.position_bias is not None:
            in_steps = cache is None or cache.window is None
            position_bias = PositionedBias(self.position_bias, query_at, key_at, q.dtype, in_steps)
            bias = position_bias if bias is None else position_bias + bias
        return q, k, v, mask, bias, slots

    def _split(self, x: Tensor, width: int) -> Tensor:
        # The number of heads follows from `x`: under tensor parallelism it holds a part of them.
        return x.reshape(*x.shape[:2], x.shape[-1] // width, width).transpose(1, 2)  # B H T D

    def _join(self, heads: Tensor, query: Tensor) -> Tensor:
        heads = heads.transpose(1, 2)  # B T H Dv
        if self.gate_proj is not None:
            heads = heads * self.gate_proj(query).sigmoid().unsqueeze(-1)
        return self.out_proj(heads.flatten(2))

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
        layer = cls._construct(sizes.pop("d_model"), n_heads, **sizes, **options)
        weight = state["q_proj.weight"]
        layer.to(device=weight.device, dtype=weight.dtype)
        layer.load_state_dict(state)
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
        layer = cls._construct(
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

    @classmethod
    def _construct(cls: type[Layer], *sizes: int, **options: Any) -> Layer:
        try:
            signature(cls).bind(*sizes, **options)
        except TypeError as error:
            raise ArgumentError(
                f"from_torch: the constructor of {cls.__name__} does not take the arguments of "
                f"MultiHeadAttention ({error}). Let it take *args and **kwargs and pass them on."
            ) from error
        return cls(*sizes, **options)

    def extra_repr(self) -> str:
        names = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "rope")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _positions(q: Tensor, k: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys: the last query is at the last key."""
    T, S = q.shape[2], k.shape[2]
    if cache is not None:
        key_at = cache.positions(S, k.device)
    else:
        key_at = torch.arange(S, device=k.device)[None]
    return (key_at if T == S else torch.arange(S - T, S, device=k.device)[None]), key_at


def _combine(mask: MaskLike | None, visible: Mask | None) -> tuple[MaskLike | None, Bias | None]:
    """A mask of what both masks allow, and the part of an additive mask that stays a bias."""
    if visible is None or mask is None:
        return (visible if mask is None else mask), None
    if isinstance(mask, Mask):
        return mask & visible, None
    if mask.dtype == torch.bool:
        return as_mask(mask) & visible, None
    allowed, bias = split_additive(mask, "MultiHeadAttention")
    combined = visible if allowed is None else allowed & visible
    return combined, None if bias is None else TensorBias(bias)


_EXAMPLES = {"rope": "RoPE(head_dim)", "position_bias": "ALiBi(n_heads)"}


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


def _read_bias(bias: bool | str) -> tuple[bool, bool]:
    """Whether the query, key and value projections have biases, and whether the others do."""
    if bias is True or bias is False:
        return bias, bias
    if bias != "qkv":
        raise ArgumentError(f"MultiHeadAttention: bias={bias!r}. Give True, False or 'qkv'.")
    return True, False


def _check_parts(
    n_heads: int,
    head_dim: int,
    rope: RoPE | None,
    position_bias: ALiBi | None,
    sinks: Tensor | float | None,
) -> None:
    """Refuse parts of the wrong type or made for other sizes."""
    for name, part, kind in ("rope", rope, RoPE), ("position_bias", position_bias, ALiBi):
        if not isinstance(part, kind | None):
            raise ArgumentError(
                f"MultiHeadAttention: {name}={part!r} is not of type {kind.__name__}. "
                f"Give one, such as {_EXAMPLES[name]}, or None."
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
    if isinstance(sinks, Tensor) and sinks.shape != (n_heads,):
        raise ShapeError(
            f"MultiHeadAttention: sinks {tuple(sinks.shape)} for n_heads={n_heads}. "
            f"Give one logit for each head, or one number for all."
        )


def _check_inputs(inputs: Mapping[str, Tensor], widths: Sequence[int], like: nn.Module) -> None:
    """Refuse inputs whose width, dtype or device differs from the layer's."""
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"MultiHeadAttention: {name} is a {type(x).__name__}. Give a tensor of floats."
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


def _check_cache(cache: KVCache, window: WindowLike | None, reads_itself: bool) -> None:
    """Refuse a cache in cross-attention, or one whose kept keys do not match the window."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(
            f"MultiHeadAttention: cache={cache!r} is not a KVCache. Give one, or None."
        )
    if not reads_itself:
        raise ArgumentError(
            "MultiHeadAttention: cache given together with key or value. "
            "A cache is for self-attention: give query alone."
        )
    n_before = window[0] if isinstance(window, tuple) else window
    if n_before is not None and cache.n_sinks:
        raise ArgumentError(
            f"MultiHeadAttention: window={window} hides the n_sinks={cache.n_sinks} first tokens "
            f"that the cache keeps. Make the layer without a window: the cache has one."
        )
    if n_before is not None and cache.window is not None and cache.window <= n_before:
        raise ArgumentError(
            f"MultiHeadAttention: window={window} sees {n_before} keys before the query's own, "
            f"but the cache keeps only window={cache.window}, the query's own included. "
            f"Give the cache window={n_before + 1}, or none."
        )


def _beyond_torch(layer: MultiHeadAttention, has_zero_key: bool) -> dict[str, bool]:
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
