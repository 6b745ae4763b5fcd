"""Write a Llama-type model as one GGUF file, which llama.cpp and what builds on it run.

llama.cpp takes the number of heads of each layer in some of its architectures alone: a model whose
layers differ is written as the one of those that computes the same.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._packages import require
from headwise.errors import UnsupportedError

GGUF = "model.gguf"
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# The architecture whose layers may have different numbers of heads. DeciLM is a Llama; OpenELM
# normalizes queries and keys as Qwen3 does, has no output layer but the embedding, and stores
# queries, keys and values in one weight.
_BY_LAYER = {"llama": "deci", "qwen2": "deci", "qwen3": "openelm"}
# These rotate neighboring dimensions where Transformers rotates the two halves of a head.
_NEIGHBORS = {"llama", "deci"}
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# How a byte-level tokenizer splits a text before it merges: llama.cpp knows these by name.
_SPLITS = {
    (None,): "gpt-2",
    ("digits", None): "smollm",
    (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,): "qwen2",
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
}
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = range(1, 7)  # gguf.TokenType


def write_gguf(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write weights, sizes and vocabulary into `model.gguf`; without a tokenizer, no vocabulary.

    Raises:
        UnsupportedError: llama.cpp would compute something else than the model, or cut texts into
            other tokens than the tokenizer.
    """
    gguf = require("gguf", "gguf", "save")
    config: Any = model.config
    layers = [layer.self_attn for layer in decoder_of(model).layers]
    head_dim = layers[0].head_dim
    counts = [_counts(attention, head_dim) for attention in layers]
    factors = _rope_factors(model, head_dim)
    architecture = _architecture(model, len({*counts}) > 1, factors is not None)
    path = folder / GGUF
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = ([*numbers] for numbers in zip(*counts, strict=True))
    uneven = architecture in _BY_LAYER.values()
    writer.add_head_count(heads if uneven else heads[0])
    writer.add_head_count_kv(kv_heads if uneven else kv_heads[0])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_vocabulary(writer, tokenizer, config.vocab_size)
    kinds = gguf.GGMLQuantizationType
    for name, weight in _tensors(model, gguf, architecture, counts, factors):
        # Vectors are kept in float32: llama.cpp has no other kernels for them.
        kind = kinds.F32 if weight.ndim == 1 else kinds[_STORED[weight.dtype]]
        values = gguf.quants.quantize(weight.detach().float().cpu().numpy(), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    with closing(writer):  # also where the disk is full
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def decoder_of(model: nn.Module) -> Any:
    """The layers of a model around its embedding.

    Raises:
        UnsupportedError: llama.cpp does not compute them.
    """
    name = type(model).__name__
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"save: format='gguf' is for {', '.join(_ARCHITECTURES)}, and this is a {name}. Choose "
            f"the format 'headwise', 'padded' or 'onnx'."
        )
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    checks = {
        f"its window of {window} tokens": window is not None
        and window < config.max_position_embeddings,
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        "the precision of some weights": any(x.dtype not in _STORED for x in model.parameters()),
    }
    _refuse(model, checks)
    return model.model


def _counts(attention: Any, head_dim: int) -> tuple[int, int]:
    """The heads and kv heads of a layer, from its weights."""
    heads = attention.q_proj.weight.shape[0] // head_dim
    return heads, attention.k_proj.weight.shape[0] // head_dim


def _architecture(model: Any, uneven: bool, scaled: bool) -> str:
    """The architecture of llama.cpp that computes the same as a model."""
    name = _ARCHITECTURES[type(model).__name__]
    is_openelm = uneven and name == "qwen3"
    biased = any(key.endswith("_proj.bias") for key in model.state_dict())
    beside = "beside layers with different numbers of heads"
    checks = {
        "its scaled RoPE": scaled and name == "qwen3",
        f"an output layer of its own {beside}": is_openelm and not model.config.tie_word_embeddings,
        f"biases of its attention {beside}": is_openelm and biased,
    }
    _refuse(model, checks)
    return _BY_LAYER[name] if uneven or (scaled and name == "qwen2") else name


def _rope_factors(model: Any, head_dim: int) -> Tensor | None:
    """What a scaled RoPE divides its frequencies by; None if it is not scaled."""
    config, rope = model.config, model.model.rotary_emb
    kind = config.rope_parameters.get("rope_type", "default")
    scaling = {*(layer.self_attn.scaling for layer in model.model.layers)}
    checks = {
        f"RoPE of the type {kind!r}": kind not in ("default", "linear", "llama3"),
        "RoPE of a part of each head": rope.inv_freq.shape[0] * 2 != head_dim,
        f"logits scaled by {[*scaling]}": scaling != {head_dim**-0.5},
    }
    _refuse(model, checks)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = config.rope_parameters["rope_theta"] ** -exponents
    factors = (plain / rope.inv_freq.double().cpu()).float()
    return None if kind == "default" else factors


def _refuse(model: nn.Module, checks: Mapping[str, bool]) -> None:
    found = [what for what, present in checks.items() if present]
    if found:
        raise UnsupportedError(
            f"save: of this {type(model).__name__}, llama.cpp would leave out {found[0]}. Choose "
            f"the format 'headwise', 'padded' or 'onnx'."
        )


def _tensors(
    model: Any, gguf: Any, architecture: str, counts: list[tuple[int, int]], factors: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of llama.cpp."""
    original = gguf.MODEL_ARCH[_ARCHITECTURES[type(model).__name__].upper()]
    names = gguf.get_tensor_name_map(original, len(counts))
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if architecture == "openelm":
        for layer in range(len(counts)):
            parts = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([weights.pop(part) for part in parts])
    if factors is not None:
        yield "rope_freqs.weight", factors
    for name, weight in weights.items():
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if translated is None:
            raise UnsupportedError(
                f"save: llama.cpp has no place for {name} of this {type(model).__name__}. Choose "
                f"the format 'headwise', 'padded' or 'onnx'."
            )
        projection = name.split(".")[-2]
        if architecture in _NEIGHBORS and projection in ("q_proj", "k_proj"):
            layer = int(name.split(".")[2])
            weight = _neighbors(weight, counts[layer][projection == "k_proj"])
        yield translated, weight


def _neighbors(weight: Tensor, n_heads: int) -> Tensor:
    """Rows reordered so that RoPE, which rotates the two halves of a head, rotates neighbors."""
    halves = weight.reshape(n_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Write the tokens, merges and special tokens of a tokenizer that llama.cpp can imitate."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(backend.to_str()) if hasattr(backend, "to_str") else {}
    model = state.get("model", {})
    if model.get("type") != "BPE":
        _refuse_tokenizer(tokenizer, f"its model is {model.get('type') or 'not one of tokenizers'}")
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [_UNUSED] * size
    by_byte = bool(model.get("byte_fallback"))
    for token, number in model["vocab"].items():
        tokens[number] = token
        kinds[number] = _BYTE if by_byte and token.startswith("<0x") else _NORMAL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if by_byte:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(_prepends_space(state, tokenizer))
        # llama.cpp merges the pair whose token has the highest score: the rank of its first merge.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(pair.replace(" ", "", 1), rank)
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(state, tokenizer))
        writer.add_token_merges(merges)
    for token in state["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = _CONTROL if token["special"] else _ADDED
    unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is not None:
        kinds[unknown] = _UNKNOWN
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special_tokens(writer, tokenizer)


def _add_special_tokens(writer: Any, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = tokenizer("a")["input_ids"] if callable(tokenizer) else tokenizer.encode("a").ids
    writer.add_add_bos_token(bool(ids) and ids[0] == getattr(tokenizer, "bos_token_id", None))
    writer.add_add_eos_token(bool(ids) and ids[-1] == getattr(tokenizer, "eos_token_id", None))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a part of a tokenizer: of a sequence, or the one that it is."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _prepends_space(state: Mapping[str, Any], tokenizer: Any) -> bool:
    """Whether a tokenizer with SentencePiece's "▁" for a space puts one before a text."""
    prepends = False
    steps = [
        *_steps(state["normalizer"], "normalizers"),
        *_steps(state["pre_tokenizer"], "pretokenizers"),
    ]
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            prepends = step.get("prepend_scheme", "always") != "never"
            known = step.get("replacement") == "▁"
        else:
            prepends |= kind == "Prepend"
            known = (kind, step.get("prepend"), step.get("content")) in (
                ("Prepend", "▁", None),
                ("Replace", None, "▁"),
            )
        if not known:
            _refuse_tokenizer(tokenizer, f"its step {kind}")
    return prepends


def _split_name(state: Mapping[str, Any], tokenizer: Any) -> str:
    """llama.cpp's name for the way in which a byte-level tokenizer splits a text."""
    found: list[str | None] = []
    # Qwen's tokenizers compose characters (NFC); llama.cpp takes texts that are composed already.
    unknown = [s["type"] for s in _steps(state["normalizer"], "normalizers") if s["type"] != "NFC"]
    for step in _steps(state["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            found += [None] if step.get("use_regex", True) else []
        elif step["type"] == "Split" and step.get("behavior") == "Isolated":
            found.append(step["pattern"].get("Regex"))
        elif step["type"] == "Digits" and step.get("individual_digits"):
            found.append("digits")
        else:
            unknown.append(step["type"])
    name = _SPLITS.get((*found,))
    if name is None or unknown:
        _refuse_tokenizer(tokenizer, f"its way of splitting texts {unknown or found}")
    return name or ""


def _refuse_tokenizer(tokenizer: Any, why: str) -> None:
    raise UnsupportedError(
        f"save: llama.cpp would cut texts into other tokens than this {type(tokenizer).__name__} "
        f"({why}). Leave the tokenizer out, and give llama.cpp tokens."
    )
