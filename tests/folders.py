"""Folders with a tiny model, as the commands expect them."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


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
