"""Mini-GPT, a small decoder-only model in the style of nanoGPT; the texts it reads and writes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headwise._evaluation import in_evaluation
from headwise._extras import require, untruncated
from headwise.corpora import BOS, EOS, PAD, SPECIALS, UNK, Grammar, Line
from headwise.errors import ArgumentError, InputError, ShapeError
from headwise.files import is_unicode
from headwise.layer import MultiHeadAttention

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class MiniGPTConfig:
    """The sizes of a Mini-GPT.

    Attributes:
        context: The maximal number of tokens of a text.
        n_kv_heads: The number of key/value heads. None is `n_heads`.
        mlp_ratio: The width of the hidden layer of each MLP, in multiples of `d_model`.
        dropout: The share of each update of the residual stream dropped in training.
    Raises:
        ArgumentError: a size is not positive, or `dropout` is not a share below 1.
        ShapeError: the heads do not divide `d_model`, or the key/value heads the heads, evenly.
    """

    vocab_size: int
    context: int = 40
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_layers: int = 3
    mlp_ratio: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "d_model", "n_heads", "n_layers", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    f"MiniGPTConfig: {name} is {getattr(self, name)}. Give a positive number."
                )
        if not 0 <= self.dropout < 1:
            raise ArgumentError(
                f"MiniGPTConfig: dropout is {self.dropout}. Give a share from 0 to below 1."
            )
        n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        if self.d_model % self.n_heads:
            raise ShapeError(
                f"MiniGPTConfig: d_model={self.d_model} is not a multiple of "
                f"n_heads={self.n_heads}. Give a multiple."
            )
        if n_kv_heads < 1 or self.n_heads % n_kv_heads:
            raise ShapeError(
                f"MiniGPTConfig: n_heads={self.n_heads} is not a multiple of "
                f"n_kv_heads={n_kv_heads}. Give a multiple."
            )


class DecoderBlock(nn.Module):
    """A pre-norm block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        width, hidden = config.d_model, config.mlp_ratio * config.d_model
        self.norm_1 = nn.LayerNorm(width)
        # Dropout on the attention weights would delay the copying heads; updates only.
        self.attention = MultiHeadAttention(width, config.n_heads, config.n_kv_heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "B T d_model"], mask: Tensor | None = None
    ) -> Float[Tensor, "B T d_model"]:
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, causal=True))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class MiniGPT(nn.Module):
    """Token and position embeddings, blocks, and a linear head over the vocabulary."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        # With torch's 1 the updates are lost in the noise; with the usual 0.02 the copying heads
        # appear too late for a run of a minute.
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T vocab_size"]:
        """The logits of the next token at every position.

        Args:
            attention_mask: 1 for tokens of the text, 0 for padding on either side. Positions are
                counted from the first token of the text. Logits at padding have no meaning.
        Raises:
            ShapeError: the text is longer than the context.
        """
        T = input_ids.shape[1]
        if self.config.context < T:
            raise ShapeError(
                f"MiniGPT: {T} tokens do not fit a context of {self.config.context}. "
                f"Shorten the text, or train with a longer context."
            )
        if attention_mask is None:
            positions, mask = torch.arange(T, device=input_ids.device), None
        else:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            mask = attention_mask.bool()[:, None, None, :]  # B 1 1 T
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


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
    rows = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    return pad_sequence(rows, batch_first=True, padding_value=number_of(tokenizer, PAD))


def number_of(tokenizer: "tokenizers.Tokenizer", word: str) -> int:
    """The id of a word in the vocabulary."""
    return tokenizer.get_vocab()[word]


@torch.no_grad()
def sample(
    model: MiniGPT,
    prompt: str,
    *,
    tokenizer: "tokenizers.Tokenizer",
    max_new_tokens: int = 40,
) -> str:
    """Continue a prompt until the end of the line, the context limit or `max_new_tokens`.

    Each word is the most likely one.

    Args:
        prompt: Words of the vocabulary, separated by white space.
    Returns:
        The prompt and its continuation.
    Raises:
        InputError: a word of the prompt is unknown, or the prompt does not fit the context.
        ArgumentError: `max_new_tokens` is negative.
    """
    if max_new_tokens < 0:
        raise ArgumentError(f"sample: max_new_tokens is {max_new_tokens}. Give 0 or more.")
    ids = encode_prompt(tokenizer, prompt, model.config.context)
    end = number_of(tokenizer, EOS)
    with in_evaluation(model):
        for _ in range(min(max_new_tokens, model.config.context - len(ids))):
            token = int(model(torch.tensor([ids]))[0, -1].argmax())
            if token == end:
                break
            ids.append(token)
    return tokenizer.decode(ids)


def encode_prompt(tokenizer: "tokenizers.Tokenizer", prompt: str, context: int) -> list[int]:
    """The tokens of a prompt, `<bos>` first.

    Args:
        context: The most tokens that the model reads.
    """
    for word in prompt.split():
        # No vocabulary has words with lone surrogates, and a tokenizer cannot look them up.
        known = is_unicode(word) and tokenizer.token_to_id(word) is not None
        if word == UNK or not known:
            raise InputError(
                f"sample: the model does not know the word {word!r}. Use its "
                f"{tokenizer.get_vocab_size()} words, with spaces between words and around commas."
            )
    ids: list[int] = untruncated(tokenizer).encode(prompt).ids
    if len(ids) > context:
        raise InputError(
            f"sample: the prompt has {len(ids)} tokens but the context holds {context}. Shorten it."
        )
    return ids
