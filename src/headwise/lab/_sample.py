"""Generates text from a prompt with a Mini-GPT."""

from typing import TYPE_CHECKING

import torch

from headwise._evaluation import in_evaluation
from headwise._extras import untruncated
from headwise._renamed import renamed
from headwise.corpora import EOS, UNK
from headwise.errors import ArgumentError, InputError
from headwise.files import is_unicode
from headwise.lab._data import number_of
from headwise.lab._model import MiniGPT

if TYPE_CHECKING:
    import tokenizers


@torch.no_grad()
@renamed(tokenizer=1)
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
    Raises:
        InputError: a word of the prompt is unknown, or the prompt does not fit the context.
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
