"""A look at images: where each word, or each patch, of a model looks in a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._display import counted, printable
from headwise._evaluation import in_evaluation
from headwise._extras import versions
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, class_of, device_of
from headwise.models.texts import token_strings
from headwise.ownership import call_model
from headwise.regions import ImageRegions, image_regions
from headwise.report._look import Look
from headwise.report._samples import Sample
from headwise.report.page import render_images
from headwise.tables import Head
from headwise.watch import Request, observe

# The most tokens whose attention is kept: beyond them some patches of an encoder are left out.
_MOST_QUERIES = 640


@dataclass(frozen=True)
class ImageLook(Look):
    """The attention of every head of a model on its images; made by `look` with `images=`.

    Attributes:
        queries: The tokens whose attention is kept, as rows of `sample.weights`: the words of a
            text, or all tokens of an encoder.
        regions: The pixels of each image token.
        images: The images.
    """

    queries: Sequence[int]
    regions: ImageRegions
    images: Sequence[Any]

    def summary(self) -> str:
        """The heads, the model, the tokens and the images, in a line."""
        heads = counted(len(self.sample.weights), "head")
        tokens = counted(len(self.sample.tokens), "token")
        return f"{heads} of {self.model}, on {tokens} and {counted(len(self.images), 'image')}."

    def __repr__(self) -> str:
        return printable(f"ImageLook: {self.summary()} .save('look.html') writes a page")

    def _page(self) -> str:
        return render_images(
            self.title, self.summary(), self.sample, self.queries, self.regions, self.images,
            self.versions,
        )  # fmt: skip


@torch.no_grad()
def look_at_images(
    model: nn.Module,
    processor: Any,
    text: str | None,
    images: Sequence[Any],
    regions: ImageRegions | None,
    title: str,
) -> ImageLook:
    """Look at the attention of a model on images; see `look`."""
    model = check_model("look", model)
    if not callable(processor):
        raise ArgumentError(
            f"look: images= with the processor {processor!r:.40}. Give tokenizer=processor, which "
            f"makes the model's inputs of images and text."
        )

    def process(images: Any) -> Mapping[str, Any]:
        words = {} if text is None else {"text": text}
        inputs: Mapping[str, Any] = processor(images=images, **words, return_tensors="pt")
        return inputs

    regions = regions or image_regions(model, process, images)
    if regions.n_texts != 1:
        raise ArgumentError(
            f"look: {regions.n_texts} texts, or images that the model reads one by one. Give one."
        )
    device = device_of(model)
    inputs = {
        name: x.to(device) if torch.is_tensor(x) else x for name, x in process(images).items()
    }
    with observe(model, Request(statistics=(), maps=True)) as watch, in_evaluation(model):
        call_model(model, inputs, "look")
        sites = [s for s in watch.sites() if s.stack == regions.stack and s.layer >= 0]
        if not sites:
            raise UnsupportedError(
                f"look: {class_of(model)} has no attention among the tokens of {regions.stack!r}. "
                f"Watch it with headwise.observe(model)."
            )
        n_tokens = watch.weights(sites[0].heads()[0], slice(0, 1)).shape[-1]
        ids = inputs.get("input_ids")
        is_text = ids is not None and ids.shape[1] == n_tokens
        queries = _queries(n_tokens, regions, is_text)
        # The words of a text stand before and after its image: rows in between are not computed.
        stretches = np.split(queries, np.flatnonzero(np.diff(queries) > 1) + 1)
        weights: dict[Head, np.ndarray] = {}
        for site in sites:
            layer = str(site.heads()[0]).rpartition(".")[0]
            parts = [
                watch.weights(layer, slice(int(rows[0]), int(rows[-1]) + 1))[0].float().cpu()
                for rows in stretches
            ]
            of_layer = torch.cat(parts, 1).numpy()
            weights |= dict(zip(site.heads(), of_layer, strict=True))
    tokens = tuple(f"token {n}" for n in range(n_tokens))
    if is_text and ids is not None:
        tokenizer = getattr(processor, "tokenizer", processor)
        tokens = token_strings(tokenizer, ids[0].tolist())
    return ImageLook(
        title=title or class_of(model),
        model=class_of(model),
        sample=Sample(tokens, weights),
        versions=versions(),
        queries=queries.tolist(),
        regions=regions,
        images=list(images),
    )


def _queries(n_tokens: int, regions: ImageRegions, is_text: bool) -> np.ndarray:
    """The words of a text; in an encoder its tokens without pixels and patches, evenly spaced."""
    patches = np.unique(regions.rows["position"])
    words = np.setdiff1d(np.arange(n_tokens), patches)
    step = -(-len(patches) // _MOST_QUERIES)
    return words if is_text else np.sort(np.concatenate([words, patches[::step]]))
