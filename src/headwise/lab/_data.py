"""Training data: a tokenizer with one token per word, and batches of lines of the grammar."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwise._extras import require
from headwise.corpora import BOS, EOS, PAD, SPECIALS, UNK, Grammar, Line

if TYPE_CHECKING:
    import tokenizers


def make_tokenizer(vocabulary: Iterable[str]) -> "tokenizers.Tokenizer":
    """A tokenizer that splits at white space only, with these words as its vocabulary.

    `encode(text)` puts `<bos>` before the text, as in training; unknown words become `<unk>`.
    The special tokens are part of the vocabulary.
    """
    tokenizers = require("tokenizers", "hf", "make_tokenizer")
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNK))
    # Not Whitespace(): y'all is one word.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])]
    )
    tokenizer.add_special_tokens(list(SPECIALS))  # so that decode() leaves them out
    return tokenizer


def draw_batch(
    grammar: Grammar, tokenizer: "tokenizers.Tokenizer", size: int, *, seed: Sequence[int]
) -> Int[Tensor, "B T"]:
    """Draw `size` lines and encode them. The same seed draws the same lines.

    In training the seed contains the number of the step, so a resumed run continues with the
    same lines as an uninterrupted one, and no generator state is stored.
    """
    rng = np.random.default_rng(seed)
    return encode_lines(tokenizer, [grammar.line(rng) for _ in range(size)])


def encode_lines(tokenizer: "tokenizers.Tokenizer", lines: Iterable[Line]) -> Int[Tensor, "B T"]:
    """Encode lines as `<bos>`, words, `<eos>`, padded on the right to the longest line."""
    texts = [f"{line} {EOS}" for line in lines]
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest = max(len(row) for row in rows)
    padding = number_of(tokenizer, PAD)
    return torch.tensor([row + [padding] * (longest - len(row)) for row in rows])


def number_of(tokenizer: "tokenizers.Tokenizer", word: str) -> int:
    """The id of a word in the vocabulary."""
    return tokenizer.get_vocab()[word]
