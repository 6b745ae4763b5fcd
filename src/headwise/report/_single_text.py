"""A look at one text: the attention of every head on it, as a page or in a notebook."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._extras import versions
from headwise.corpora import one_text
from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.models import check_model, class_of, device_of
from headwise.models.texts import (
    beginning_of,
    check_reads_text,
    context_of,
    pad,
    reads_two_texts,
    text_alone,
    tokenizer_of,
)
from headwise.regions import ImageRegions
from headwise.report._image_look import look_at_images
from headwise.report._look import Look
from headwise.report._samples import sample_piece
from headwise.tables import Head
from headwise.watch import Word, links_of, word_tokens

# Tokens of an encoder-decoder's own output.
_OUTPUT_TOKENS = 40


def look(
    model: nn.Module,
    text: Any,
    *,
    tokenizer: Any = None,
    source: Word | None = None,
    target: Word | None = None,
    images: Sequence[Any] | None = None,
    regions: ImageRegions | None = None,
    title: str = "",
) -> Look:
    """Look at the attention of every head of a model on one text.

    The model is in evaluation mode while it runs. A text beyond the model's context is cut there.

    Args:
        model: A Mini-GPT, a Hugging Face model, or any model that takes `input_ids` and
            `attention_mask`.
        text: The text, a string.
        tokenizer: Its tokenizer. None uses that of a `SentenceTransformer`. With images, the
            processor of the model.
        source: With `target`, two words of the text, as `hw.links` takes them: the page opens on
            them, and on the head with the strongest link from this one to `target`.
        target: The word that is attended to. Or, for an encoder-decoder and without `source`, what
            its decoder reads: None takes what the model itself generates, up to 40 tokens, or the
            text if it generates nothing.
        images: PIL images that the text is about, with their places in the text, as the processor
            takes both. An encoder of images has the text None.
        regions: The pixels of each image token. None measures them, with `hw.image_regions`.
        title: The name of the page. None is the model's class.
    Returns:
        The attention: `.save("look.html")` writes a page, and a notebook shows it. A text of up
        to 64 tokens has exact maps, a longer one the four strongest pairs of each query.
    Raises:
        ArgumentError: the text is not a string; one of two words is missing, or `hw.links`
            refuses them; or they stand beyond the model's context.
        InputError: the text holds no token.
        UnsupportedError: the model cannot be watched exactly, or reads more than text.
    """
    beside = {"regions": regions} if images is None else {"source": source, "target": target}
    if unread := [name for name, value in beside.items() if value is not None]:
        how = "without" if images is None else "with"
        raise ArgumentError(f"look: {unread[0]}= {how} images=. Leave out what is not read.")
    if images is not None:
        return look_at_images(model, tokenizer, text, images, regions, title)
    wrapper, model = model, check_model("look", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "look")
    check_reads_text("look", model)
    text = one_text("look", text)
    two = reads_two_texts(model)
    if source is not None and target is None:
        raise ArgumentError(f"look: source={source!r:.60} without target. Give both, or neither.")
    if source is None and target is not None and not two:
        raise ArgumentError(
            f"look: target={target!r:.60} alone is for an encoder-decoder, and "
            f"{type(model).__name__} reads one text. Give source too, or leave it out."
        )
    if source is not None and two:
        raise UnsupportedError(
            f"look: source={source!r:.60} for {type(model).__name__}, which reads two texts. "
            f"Leave it out."
        )
    linked = None
    with in_evaluation(model):
        if two and target is None:
            target = _generated(model, tokenizer, text) or text
        limit = context_of(model, tokenizer)
        piece = beginning_of(tokenizer, (text, str(target) if two else None), model, limit)
        if piece is None:
            raise InputError(f"look: {text!r:.60} holds no token. Give a text with words.")
        if source is not None and target is not None:
            ids, query, key = word_tokens(tokenizer, text, source, target)
            end = max(query[1], key[1])
            if list(ids[:end]) != list(piece.source[:end]):
                raise ArgumentError(
                    f"look: {source!r} or {target!r} stands beyond the {len(piece.source)} tokens "
                    f"that the model can read. Leave out some of what is before."
                )
            table = links_of(model, piece.source, query, key, (source, target))
            linked = Head.parse(table["name"][0]), query, key
        sample = sample_piece("look", model, tokenizer, piece)
    return Look(
        title=title or type(model).__name__,
        model=class_of(model),
        sample=replace(sample, linked=linked),
        versions=versions(),
    )


@torch.no_grad()
def _generated(model: nn.Module, tokenizer: Any, text: str) -> str:
    """What an encoder-decoder generates for a text, greedily; "" if it cannot."""
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        return ""
    piece = beginning_of(tokenizer, (text, None), model, context_of(model, tokenizer))
    if piece is None:
        return ""
    ids = pad([piece.source], device_of(model))
    with text_alone("look", model):
        output = generate(**ids, max_new_tokens=_OUTPUT_TOKENS, do_sample=False, num_beams=1)
    return str(tokenizer.decode(output[0].tolist(), skip_special_tokens=True)).strip()
