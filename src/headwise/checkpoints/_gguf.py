"""Write a Llama-type model as one GGUF file, which llama.cpp and what builds on it run.

llama.cpp takes the number of heads of each layer in some of its architectures alone: a model is
written as the first of its architectures that reads all of its weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise._extras import require
from headwise._torch_private import has_forward_hooks
from headwise.checkpoints._gguf_vocabulary import vocabulary
from headwise.errors import UnsupportedError


class Architecture(NamedTuple):
    """What llama.cpp's loader of an architecture reads; with any other tensor it opens no file.

    The letters are sizes: V tokens, E the model, Q and K all heads and kv heads of a layer, J both
    of them with the values, F its MLP, D a head, R half a head.

    Attributes:
        tensors: The shapes of the weights; those in `blk` are of each layer.
        optional: Shapes of weights that may be missing.
        by_layer: Whether layers may differ; otherwise all have the sizes of the first one.
        neighbors: Whether RoPE rotates neighboring dimensions, where Transformers rotates the two
            halves of a head.
    """

    tensors: Mapping[str, str]
    optional: Mapping[str, str] = {}
    by_layer: bool = False
    neighbors: bool = False


_COMMON = {
    "token_embd.weight": "VE", "output_norm.weight": "E", "blk.attn_norm.weight": "E",
    "blk.attn_output.weight": "EQ", "blk.ffn_norm.weight": "E", "blk.ffn_gate.weight": "FE",
    "blk.ffn_down.weight": "EF", "blk.ffn_up.weight": "FE",
}  # fmt: skip
_SPLIT = {"blk.attn_q.weight": "QE", "blk.attn_k.weight": "KE", "blk.attn_v.weight": "KE"}
_SPLIT_BIASES = {"blk.attn_q.bias": "Q", "blk.attn_k.bias": "K", "blk.attn_v.bias": "K"}
_NORMS = {"blk.attn_q_norm.weight": "D", "blk.attn_k_norm.weight": "D"}
_OUTPUT = {"output.weight": "VE"}
_LLAMA = _OUTPUT | _SPLIT_BIASES | {
    "blk.attn_output.bias": "E", "blk.ffn_gate.bias": "F", "blk.ffn_down.bias": "E",
    "blk.ffn_up.bias": "F", "rope_freqs.weight": "R",
}  # fmt: skip
# As src/models/*.cpp of llama.cpp have it. DeciLM is a Llama whose layers may differ. OpenELM
# normalizes queries and keys as Qwen3 does, and has no output layer but the embedding.
ARCHITECTURES = {
    "llama": Architecture(_COMMON | _SPLIT, _LLAMA, neighbors=True),
    "deci": Architecture(_COMMON | _SPLIT, _LLAMA, by_layer=True, neighbors=True),
    "qwen2": Architecture(
        # All of its heads are as wide as the model.
        _COMMON | _SPLIT | {"blk.attn_q.weight": "EE", "blk.attn_output.weight": "EE"},
        _OUTPUT | _SPLIT_BIASES | {"output.bias": "V"},
    ),
    "qwen3": Architecture(_COMMON | _SPLIT | _NORMS, _OUTPUT | _SPLIT_BIASES),
    "openelm": Architecture(_COMMON | _NORMS | {"blk.attn_qkv.weight": "JE"}, by_layer=True),
}
_WRITTEN_AS = {
    "LlamaForCausalLM": ("llama", "deci"),
    "MistralForCausalLM": ("llama", "deci"),
    "Qwen2ForCausalLM": ("qwen2", "deci"),
    "Qwen3ForCausalLM": ("qwen3", "openelm"),
}
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# What a scaled RoPE divides its frequencies by: no weight of the model.
_FACTORS = "the factors of its scaled RoPE"
# Kinds of RoPE whose frequencies do not depend on the length of the text.
_FIXED_ROPE = ("default", "linear", "llama3")

# By its name in the file: what the weight is in the model, and the weight.
Weights = dict[str, tuple[str, Tensor]]


def as_gguf(model: Any, _: Any, __: Any, tokenizer: Any) -> Callable[[Path], None]:
    """Weights, sizes and vocabulary in `model.gguf`; without a tokenizer, no vocabulary."""
    name, config = type(model).__name__, model.config
    if name not in _WRITTEN_AS:
        raise UnsupportedError(
            f"save: format='gguf' is for {', '.join(_WRITTEN_AS)}, and this is a {name}. Choose "
            f"another format, such as 'headwise' or 'padded'."
        )
    gguf = require("gguf", "gguf", "save")
    head_dim = model.model.layers[0].self_attn.head_dim
    _refuse_settings(model, head_dim)
    architecture, sizes, weights = form(model, gguf, head_dim)
    # One number for all layers where they cannot differ.
    heads, kv_heads, widths = (
        [layer[letter] // part for layer in sizes] if ARCHITECTURES[architecture].by_layer
        else sizes[0][letter] // part
        for letter, part in (("Q", head_dim), ("K", head_dim), ("F", 1))
    )  # fmt: skip
    n_tokens = sizes[0]["V"]
    fields = {
        "head_count": heads,
        "head_count_kv": kv_heads,
        "context_length": config.max_position_embeddings,
        "embedding_length": sizes[0]["E"],
        "block_count": len(sizes),
        "feed_forward_length": widths,
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": head_dim,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": n_tokens,
        "tokenizer_model": "no_vocab",
    }
    if tokenizer is not None:
        fields |= vocabulary(tokenizer, n_tokens, config)

    def write(folder: Path) -> None:
        writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
        for field, value in fields.items():
            getattr(writer, f"add_{field}")(value)
        kinds = gguf.GGMLQuantizationType
        for key, (_, weight) in weights.items():
            # Vectors are kept in float32: llama.cpp has no other kernels for them.
            kind = kinds.F32 if weight.ndim == 1 else kinds[_STORED[weight.dtype]]
            values = gguf.quants.quantize(weight.detach().float().cpu().numpy(), kind)
            writer.add_tensor(key, values, raw_dtype=kind)
        with closing(writer):  # also where the disk is full
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()

    return write


def _refuse_settings(model: Any, head_dim: int) -> None:
    """Refuse what a model computes beside its weights, and llama.cpp does not."""
    config, layers = model.config, [layer.self_attn for layer in model.model.layers]
    longest, rotary = config.max_position_embeddings, model.model.rotary_emb
    window = getattr(config, "sliding_window", None) or longest
    kind = config.rope_parameters.get("rope_type", "default")
    scaling = {*(layer.scaling for layer in layers)}
    activations = {type(layer.mlp.act_fn).__name__ for layer in model.model.layers}
    epsilons = {x.variance_epsilon for x in model.modules() if hasattr(x, "variance_epsilon")}
    hooked = [
        name or type(model).__name__ for name, x in model.named_modules() if has_forward_hooks(x)
    ]
    left_out = {
        f"the hooks of {', '.join(hooked[:3])}": bool(hooked),
        "attention to later tokens": not all(layer.is_causal for layer in layers),
        f"its window of {window} tokens": window < longest,
        f"the activation {', '.join(sorted(activations))}": activations != {"SiLUActivation"},
        "the precision of some weights": any(x.dtype not in _STORED for x in model.parameters()),
        f"RoPE of the type {kind!r}": kind not in _FIXED_ROPE,
        "RoPE of a part of each head": len(rotary.inv_freq) * 2 != head_dim,
        f"queries and keys scaled by {rotary.attention_scaling}": rotary.attention_scaling != 1,
        f"logits scaled by {[*scaling]}": scaling != {head_dim**-0.5},
        f"the epsilons {sorted(epsilons)} of its norms": epsilons != {config.rms_norm_eps},
    }
    for what, is_present in left_out.items():
        if is_present:
            raise UnsupportedError(
                f"save: of this {type(model).__name__}, llama.cpp would leave out {what}. Choose "
                f"another format, such as 'headwise' or 'padded'."
            )


def form(model: Any, gguf: Any, head_dim: int) -> tuple[str, list[dict[str, int]], Weights]:
    """The first architecture that reads all weights of a model, the sizes of each layer, and the
    weights under the names of llama.cpp."""
    name, why = type(model).__name__, []
    first = gguf.MODEL_ARCH[_WRITTEN_AS[name][0].upper()]
    names = gguf.get_tensor_name_map(first, len(model.model.layers))
    sizes = [_sizes(model, layer, head_dim) for layer in model.model.layers]
    for architecture in _WRITTEN_AS[name]:
        kind = ARCHITECTURES[architecture]
        weights = {}
        for part, weight in _weights(model, head_dim, kind):
            key = names.get_name(part, try_suffixes=(".weight", ".bias"))
            weights["rope_freqs.weight" if part == _FACTORS else key or part] = part, weight
        problem = unread(weights, kind, sizes)
        if not problem:
            return architecture, sizes, weights
        why.append(f"as {architecture}, {problem}")
    raise UnsupportedError(
        f"save: llama.cpp would not compute the same as this {name}: {'; '.join(why)}. Choose "
        f"another format, such as 'headwise' or 'padded'."
    )


def _sizes(model: Any, layer: Any, head_dim: int) -> dict[str, int]:
    """The sizes of a layer, from its weights: the configuration has those before pruning."""
    tokens, width = model.model.embed_tokens.weight.shape
    queries, keys = (x.weight.shape[0] for x in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    sizes = {"V": tokens, "E": width, "Q": queries, "K": keys, "J": queries + 2 * keys}
    return sizes | {"F": layer.mlp.up_proj.weight.shape[0], "D": head_dim, "R": head_dim // 2}


def unread(weights: Weights, kind: Architecture, sizes: Sequence[Mapping[str, int]]) -> str:
    """Which weights the loader of an architecture would not read; empty if it reads all."""
    read: dict[str, tuple[int, ...]] = {}
    for key, letters in {**kind.optional, **kind.tensors}.items():
        for number, of_layer in enumerate(sizes if key.startswith("blk.") else sizes[:1]):
            shape = tuple((of_layer if kind.by_layer else sizes[0])[letter] for letter in letters)
            full = key.replace("blk.", f"blk.{number}.")
            read[full] = shape
            if key in kind.tensors and full not in weights:
                return f"it needs {full}, which the model lacks"
    for key, (name, weight) in weights.items():
        if key not in read:
            return f"it leaves out {name}"
        if read[key] != weight.shape:
            return f"{name} is {tuple(weight.shape)}, and it reads {read[key]}"
    return ""


def _weights(model: Any, head_dim: int, kind: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The weights as an architecture has them, by their names in the model."""
    weights = dict(model.state_dict())
    # A configuration may say that they are one weight where they were made two, and the reverse.
    if torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        del weights["lm_head.weight"]
    if "blk.attn_qkv.weight" in kind.tensors:
        for layer in range(len(model.model.layers)):
            parts = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([weights.pop(part) for part in parts])
    theta, frequencies = model.config.rope_parameters["rope_theta"], model.model.rotary_emb.inv_freq
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    factors = (theta**-exponents / frequencies.double().cpu()).float()
    # A model that was cast has its frequencies rounded.
    rounding = max(1e-5, torch.finfo(frequencies.dtype).eps)
    if not torch.allclose(factors, torch.ones_like(factors), rtol=rounding):
        yield _FACTORS, factors
    for name, weight in weights.items():
        if kind.neighbors and name.split(".")[-2] in ("q_proj", "k_proj"):
            # RoPE rotates the two halves of a head: reordered, it rotates neighbors.
            halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        yield name, weight
