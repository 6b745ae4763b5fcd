"""A tiny Llama in memory or in a folder as the commands expect it; a tiny Gemma and BERT."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn

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


def tiny_bert(seed: int = 0) -> transformers.BertModel:
    """An encoder of two layers of four heads, with random weights, in evaluation."""
    torch.manual_seed(seed)
    sizes = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


def write_llama(folder: Path, words: tuple[str, ...], **sizes: int) -> None:
    """A Llama of two layers and a tokenizer of whole words, the first three of them special."""
    known = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, words[0]))
    known.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, pad_token=words[0])
    tokenizer.save_pretrained(folder)
    sizes = {"max_position_embeddings": 40} | sizes
    config = transformers.LlamaConfig(
        vocab_size=len(words), num_hidden_layers=2, intermediate_size=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
