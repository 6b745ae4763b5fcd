"""A tiny Llama in memory, in a folder as commands expect it, or in GGUF; a tiny Gemma and BERT."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from torch import nn

import headwise as hw

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 13}


def tiny_llama(seed: int = 0, **more: Any) -> transformers.LlamaForCausalLM:
    """A Llama of two layers of four heads, with random weights, in evaluation."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES | more)).eval()


def tiny_gemma() -> nn.Module:
    """A Gemma 4 whose last two layers attend to the keys and values of the first two."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, global_head_dim=8, intermediate_size=16, vocab_size=23, sliding_window=4,
        vocab_size_per_layer_input=23, hidden_size_per_layer_input=4, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config).eval()


def tiny_bert(**more: Any) -> transformers.BertModel:
    """An encoder of two layers of four heads, with random weights, in evaluation."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
    return transformers.BertModel(transformers.BertConfig(**sizes | more)).eval()


def tiny_t5(**more: Any) -> transformers.T5ForConditionalGeneration:
    """An encoder-decoder of two layers of four heads in each stack, in evaluation."""
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": 23}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(**sizes | tokens | more)
    return transformers.T5ForConditionalGeneration(config).eval()


def two_berts() -> transformers.EncoderDecoderModel:
    """An encoder-decoder of two BERTs of two layers of four heads, in evaluation."""
    encoder = tiny_bert(vocab_size=23)
    config = encoder.config.to_dict() | {"is_decoder": True, "add_cross_attention": True}
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**config))
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 3
    return model.eval()


def word_tokenizer(words: Iterable[str], unknown: str | None = None) -> Tokenizer:
    """A tokenizer of whole words; another word is the first, or the unknown one."""
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, unknown or next(iter(ids))))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def write_llama(folder: Path, words: tuple[str, ...], **sizes: int) -> None:
    """A Llama of two layers and a tokenizer of whole words, the first three of them special."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(words), pad_token=words[0]
    )
    tokenizer.save_pretrained(folder)
    sizes = {"max_position_embeddings": 40} | sizes
    config = transformers.LlamaConfig(
        vocab_size=len(words), num_hidden_layers=2, intermediate_size=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_gguf(path: Path) -> None:
    """A Llama in four bits with a tokenizer of bytes and a chat template."""
    tokens = [*sorted(ByteLevel.alphabet()), "th", "<s>"]
    known: Any = Tokenizer(BPE({token: n for n, token in enumerate(tokens)}, [("t", "h")]))
    known.pre_tokenizer = ByteLevel(add_prefix_space=False)
    known.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    model = tiny_llama(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4,
        vocab_size=320,
    )  # fmt: skip
    saved = hw.save(model, path.parent / "written", format="gguf", tokenizer=tokenizer)
    quantize_gguf(saved / "model.gguf", path, "Q4_1", 3)


def quantize_gguf(path: Path, into: Path, kind: str, file_type: int) -> Path:
    """The GGUF file of a Llama with its matrices stored as blocks."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(into, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        to = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return into
