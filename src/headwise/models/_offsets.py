"""Token ids with the characters that each token stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise._packages import is_tokenizer_of_rust
from headwise.corpora import Span
from headwise.errors import UnsupportedError


@dataclass(frozen=True)
class TokenOffsets:
    """The tokens of one text.

    Attributes:
        ids: The token ids.
        spans: The characters of each token in the text; empty for tokens without any.
        added: 1 for a special token that the tokenizer added.
    """

    ids: Sequence[int]
    spans: Sequence[Span]
    added: Sequence[int]

    def tokens_in(self, text: str, span: Span) -> list[int]:
        """The tokens that share a character other than white space with a span of the text."""
        first, last = span
        return [
            token
            for token, (token_first, token_last) in enumerate(self.spans)
            if not self.added[token]
            and (start := max(first, token_first)) < (end := min(last, token_last))
            and text[start:end].strip()
        ]


def untruncated(tokenizer: Any) -> Any:
    """A tokenizer that reports character offsets, without its own truncation and padding.

    Raises:
        UnsupportedError: the tokenizer does not report character offsets.
    """
    rust = is_tokenizer_of_rust(tokenizer)
    if not rust and not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"tokenize: {type(tokenizer).__name__} cannot say which characters a token stands "
            f"for (a slow tokenizer). Load its fast version (use_fast=True)."
        )
    if rust and (tokenizer.truncation or tokenizer.padding):
        # A copy: the caller's stays as it is.
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def token_offsets(tokenizer: Any, texts: Sequence[str]) -> list[TokenOffsets]:
    """The tokens of each text and their characters, by a tokenizer from `untruncated`."""
    if not texts:  # some tokenizers reject an empty list
        return []
    if is_tokenizer_of_rust(tokenizer):
        encodings = tokenizer.encode_batch(list(texts))
        return [TokenOffsets(enc.ids, enc.offsets, enc.special_tokens_mask) for enc in encodings]
    output = tokenizer(
        list(texts),
        truncation=False,
        padding=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,  # the caller cuts texts that are too long
    )
    columns = (output["input_ids"], output["offset_mapping"], output["special_tokens_mask"])
    return [TokenOffsets(*parts) for parts in zip(*columns, strict=True)]
