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

# llama.cpp's architecture, and the one whose layers may have different numbers of heads. DeciLM
# is a Llama; OpenELM normalizes queries and keys as Qwen3 does, has no output layer but the
# embedding, and stores queries, keys and values in one weight.
_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "deci"),
    "MistralForCausalLM": ("llama", "deci"),
    "Qwen2ForCausalLM": ("qwen2", "deci"),
    "Qwen3ForCausalLM": ("qwen3", "openelm"),
}
# These rotate neighboring dimensions where Transformers rotates the two halves of a head.
_NEIGHBORS = {"llama", "deci"}
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# What does not change the tokens that a step of a tokenizer makes, with the marks of spaces below.
_IRRELEVANT = ("trim_offsets", "split")
# The steps by which tokenizers with SentencePiece's "▁" for a space put it in, and whether they put
# one before a text too.
_SPACES = {
    "Prepend ▁": True,
    "Replace {'String': ' '} ▁": False,
    "Metaspace ▁ always": True,
    "Metaspace ▁ first": True,
    "Metaspace ▁ never": False,
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT = "Split {} Isolated False"
# How a byte-level tokenizer splits a text before it merges: llama.cpp knows these by name.
_SPLITS = {
    ("ByteLevel False True",): "gpt-2",
    ("Digits True", "ByteLevel False True"): "smollm",
    (_SPLIT.format({"Regex": rf"{_WORDS}\p{{N}}{_REST}"}), "ByteLevel False False"): "qwen2",
    (
        _SPLIT.format({"Regex": _WORDS + r"\p{N}{1,3}" + _REST}),
        "ByteLevel False False",
    ): "llama-bpe",
}
_LEFT_OUT = "save: of this {}, llama.cpp would leave out {}. Use 'headwise', 'padded' or 'onnx'."


def write_gguf(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write weights, sizes and vocabulary into `model.gguf`; without a tokenizer, no vocabulary.

    Raises:
        UnsupportedError: llama.cpp would compute something else than the model, or cut texts into
            other tokens than the tokenizer.
    """
    gguf = require("gguf", "gguf", "save")
    architecture, head_dim, counts, factors = gguf_form(model)
    config: Any = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    heads, kv_heads = ([*numbers] for numbers in zip(*counts, strict=True))
    by_layer = architecture in ("deci", "openelm")
    writer.add_head_count(heads if by_layer else heads[0])
    writer.add_head_count_kv(kv_heads if by_layer else kv_heads[0])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(counts))
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
        _add_vocabulary(gguf, writer, tokenizer, config.vocab_size)
    kinds = gguf.GGMLQuantizationType
    for name, weight in _tensors(model, gguf, architecture, head_dim, factors):
        # Vectors are kept in float32: llama.cpp has no other kernels for them.
        kind = kinds.F32 if weight.ndim == 1 else kinds[_STORED[weight.dtype]]
        values = gguf.quants.quantize(weight.detach().float().cpu().numpy(), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    with closing(writer):  # also where the disk is full
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def gguf_form(model: Any) -> tuple[str, int, list[tuple[int, int]], Tensor | None]:
    """How llama.cpp computes what a model does.

    Returns:
        Its architecture, the width of a head, the heads and kv heads of each layer, and what a
        scaled RoPE divides its frequencies by; None if it is not scaled.
    Raises:
        UnsupportedError: llama.cpp does not compute it.
    """
    name = type(model).__name__
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"save: format='gguf' is for {', '.join(_ARCHITECTURES)}, and this is a {name}. Choose "
            f"the format 'headwise', 'padded' or 'onnx'."
        )
    config, (architecture, by_layer) = model.config, _ARCHITECTURES[name]
    layers = [layer.self_attn for layer in model.model.layers]
    head_dim = layers[0].head_dim
    counts = [  # from the weights, because the configuration has the numbers before pruning
        (x.q_proj.weight.shape[0] // head_dim, x.k_proj.weight.shape[0] // head_dim) for x in layers
    ]
    is_uneven = len({*counts}) > 1
    is_openelm = is_uneven and architecture == "qwen3"
    longest, rope = config.max_position_embeddings, config.rope_parameters
    window = getattr(config, "sliding_window", None) or longest
    kind = rope.get("rope_type", "default")
    frequencies = model.model.rotary_emb.inv_freq.double().cpu()
    scaling = {*(layer.scaling for layer in layers)}
    beside = "beside layers with different numbers of heads"
    # llama.cpp reads the factors of a scaled RoPE for a Llama or a DeciLM alone.
    known = ("default",) if architecture == "qwen3" else ("default", "linear", "llama3")
    left_out = {
        f"its window of {window} tokens": window < longest,
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        "the precision of some weights": any(x.dtype not in _STORED for x in model.parameters()),
        f"RoPE of the type {kind!r}": kind not in known,
        "RoPE of a part of each head": len(frequencies) * 2 != head_dim,
        f"logits scaled by {[*scaling]}": scaling != {head_dim**-0.5},
        f"an output layer of its own {beside}": is_openelm and not config.tie_word_embeddings,
        f"biases of its attention {beside}": is_openelm
        and any(name.endswith("_proj.bias") for name in model.state_dict()),
    }
    for what, is_present in left_out.items():
        if is_present:
            raise UnsupportedError(_LEFT_OUT.format(name, what))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    factors = (rope["rope_theta"] ** -exponents / frequencies).float()
    if is_uneven or (kind != "default" and architecture == "qwen2"):
        architecture = by_layer
    return architecture, head_dim, counts, None if kind == "default" else factors


def _tensors(
    model: Any, gguf: Any, architecture: str, head_dim: int, factors: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of llama.cpp."""
    original = gguf.MODEL_ARCH[_ARCHITECTURES[type(model).__name__][0].upper()]
    names = gguf.get_tensor_name_map(original, len(model.model.layers))
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if architecture == "openelm":
        for layer in range(len(model.model.layers)):
            parts = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([weights.pop(part) for part in parts])
    if factors is not None:
        yield "rope_freqs.weight", factors
    for name, weight in weights.items():
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if translated is None:
            raise UnsupportedError(_LEFT_OUT.format(type(model).__name__, name))
        if architecture in _NEIGHBORS and name.split(".")[-2] in ("q_proj", "k_proj"):
            # RoPE rotates the two halves of a head: reordered, it rotates neighbors.
            halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        yield translated, weight


def _add_vocabulary(gguf: Any, writer: Any, tokenizer: Any, size: int) -> None:
    """Write the tokens, merges and special tokens of a tokenizer that llama.cpp can imitate."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(backend.to_str()) if hasattr(backend, "to_str") else {}
    model, steps = state.get("model", {}), _steps(state)
    by_byte = bool(model.get("byte_fallback"))
    # Qwen's tokenizers compose characters (NFC); llama.cpp takes texts that are composed already.
    split = None if by_byte else _SPLITS.get(tuple(step for step in steps if step != "NFC"))
    if model.get("type") != "BPE" or not (split or (by_byte and {*steps} <= _SPACES.keys())):
        raise UnsupportedError(
            f"save: llama.cpp would cut texts into other tokens than this "
            f"{type(tokenizer).__name__} (its model is {model.get('type', 'none of tokenizers')}, "
            f"its way of splitting texts {steps}). Leave the tokenizer out, and give llama.cpp "
            f"tokens."
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kind, kinds = gguf.TokenType, [gguf.TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number] = token
        kinds[number] = kind.BYTE if by_byte and token.startswith("<0x") else kind.NORMAL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if split:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(any(_SPACES[step] for step in steps))
        # llama.cpp merges the pair whose token has the highest score: the rank of its first merge.
        ranks = {pair.replace(" ", "", 1): rank for rank, pair in [*enumerate(merges)][::-1]}
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
    for token in state["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = kind.CONTROL if token["special"] else kind.USER_DEFINED
    if model.get("unk_token") in model["vocab"]:
        kinds[model["vocab"][model["unk_token"]]] = kind.UNKNOWN
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
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


def _steps(state: Mapping[str, Any]) -> list[str]:
    """The steps in which a tokenizer normalizes and splits a text, each with what decides in it."""
    steps = []
    for part in filter(None, (state.get("normalizer"), state.get("pre_tokenizer"))):
        steps += part.get("normalizers", part.get("pretokenizers", [part]))
    return [
        " ".join(str(x) for name, x in step.items() if name not in _IRRELEVANT) for step in steps
    ]
