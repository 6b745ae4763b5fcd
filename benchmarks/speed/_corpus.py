"""A generated corpus of any size, and a Llama whose pass takes one core."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = ("[PAD]", "<s>", "</s>", *(f"w{number}" for number in range(2000)))


def write_model(folder: Path, width: int = 128, heads: int = 4, context: int = 512) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of whole words."""
    known = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, WORDS[0]))
    known.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, pad_token=WORDS[0])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), num_hidden_layers=2, hidden_size=width, intermediate_size=width,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_corpus(path: Path, n_bytes: int, words: int = 120) -> Path:
    """JSON lines of random texts of about this many words, until the file has these bytes.

    A block of distinct texts is written again and again: reading does not depend on it.
    """
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"id": number, "text": " ".join(rng.choice(WORDS[3:], size))}) + "\n"
        for number, size in enumerate(rng.integers(words // 2, words * 3 // 2, 2000))
    ]
    block = "".join(lines).encode()
    with path.open("wb") as file:
        while file.tell() + len(block) <= n_bytes:
            file.write(block)
        for line in lines:
            if file.tell() + len(line) <= n_bytes:
                file.write(line.encode())
    return path
