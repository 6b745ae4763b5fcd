"""The page of images: the pictures themselves, the regions of tokens, and where heads look."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from headwise.regions import ImageRegions
from headwise.report._samples import Sample
from headwise.report.page._payload import MAX_BYTES, Payload, addresses, as_json, bytes_of
from headwise.report.page._render import DATA, facts, fill_page
from headwise.report.page._visible_text import visible, visible_token

_SCRIPTS = (
    *("core/dom", "core/study", "core/numbers", "core/grid", "core/heads"),
    *("image/regions", "core/scroll"),
)
# The longest side of a picture on the page, in pixels: about 200 KB as JPEG. Many are smaller.
_LONGEST = 1024
_SMALL = 256  # exact up to here
# A sink receives this many times what even attention would give it, from all queries and heads.
_SINK = 10
_MOST_SINKS = 8


def render_images(
    title: str,
    summary: str,
    sample: Sample,
    queries: Sequence[int],
    regions: ImageRegions,
    images: Sequence[Any],
    versions: Mapping[str, str],
) -> str:
    """The page of images as text. Whatever comes from the model is escaped."""
    content = {
        "title": visible(title), "summary": visible(summary), "versions": facts(versions),
        "is_text": len(queries) < len(sample.tokens) and regions.stack != "",
    }  # fmt: skip
    page = fill_page("images.html", content, _SCRIPTS)
    videos = [image if isinstance(image, list | tuple) else [image] for image in images]
    places = [(n, frame) for n, video in enumerate(videos) for frame in range(len(video))]
    data = _payload(sample, queries, regions, places)
    longest = _LONGEST
    data["pictures"] = [_inline(picture, longest) for video in videos for picture in video]
    while len(as_json(data)) > MAX_BYTES / 2 and longest > 1:  # as of a long video
        longest //= 2
        data["pictures"] = [_inline(picture, longest) for video in videos for picture in video]
    _add_maps(data, sample, MAX_BYTES - len(page.encode()) - len(as_json(data)))
    return page.replace(DATA, as_json(data), 1)


def _inline(picture: Any, longest: int) -> Payload:
    """A picture inside the page, with its own size."""
    small, file = picture.convert("RGB"), BytesIO()
    small.thumbnail((longest, longest))
    kind = "png" if max(picture.size) <= _SMALL else "jpeg"
    small.save(file, kind, quality=90)
    source = base64.b64encode(file.getvalue()).decode("ascii")
    width, height = picture.size
    return {"source": f"data:image/{kind};base64,{source}", "width": width, "height": height}


def _payload(
    sample: Sample, queries: Sequence[int], regions: ImageRegions, places: Sequence[Any]
) -> Payload:
    heads = list(sample.weights)
    weights = np.stack([*sample.weights.values()])
    received = weights.mean((0, 1))
    order = np.argsort(-received)[:_MOST_SINKS]
    sinks = [int(key) for key in order if received[key] >= _SINK / len(received)]
    rows = regions.rows.sort_values("position")
    box = rows[["left", "top", "right", "bottom"]].to_numpy().round(1)
    picture = [places.index(place) for place in zip(rows["image"], rows["frame"], strict=True)]
    seen = np.zeros(len(sample.tokens), bool)
    seen[rows["position"]] = True
    # The head whose last query picks single regions out most, sinks left out.
    last = np.delete(weights[:, -1] * seen, sinks, 1)
    return {
        **addresses(heads),
        "start": int(last.max(1).argmax()), "statistics": [], "findings": [], "roles": None,
        "pair": [], "samples": [], "places": {},
        "tokens": [visible_token(token) for token in sample.tokens],
        "regions": [
            [int(token), int(which), *map(float, edges)]
            for token, which, edges in zip(rows["position"], picture, box, strict=True)
        ],
        "queries": list(queries),
        "sinks": [[key, round(float(received[key]), 4)] for key in sinks],
        "maps": {}, "means": {}, "missing": 0,
    }  # fmt: skip


def _add_maps(data: Payload, sample: Sample, room: int) -> None:
    """Add the mean of each layer, then the heads, the first of them first, as far as they fit."""
    layers: dict[int, list[np.ndarray]] = {}
    for head, weights in sample.weights.items():
        layers.setdefault(head.layer, []).append(weights)
    maps = [("means", str(layer), np.mean(of_heads, 0)) for layer, of_heads in layers.items()]
    order = sorted(enumerate(sample.weights.values()), key=lambda x: x[0] != data["start"])
    maps += [("maps", str(head), weights) for head, weights in order]
    for kind, name, weights in maps:
        content = bytes_of(weights)
        room -= len(content[1]) + 32
        if room < 0:
            data["missing"] += kind == "maps"
            continue
        data[kind][name] = content
