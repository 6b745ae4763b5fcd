"""The attention weights themselves, as `output_attentions=True` returns them in eager mode."""

from collections.abc import Collection, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.capture import AttentionCall, Site
from headwise.corpora import list_texts
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, device_of, model_inputs
from headwise.models.texts import (
    check_fits,
    check_reads_text,
    pad,
    reads_two_texts,
    text_alone,
    token_offsets,
    tokenizer_of,
)
from headwise.ownership import call_model
from headwise.tables import HeadsLike, resolve_heads
from headwise.watch._maps import Queries, ranges_of, weights_of_heads
from headwise.watch._observe import check_arguments, open_watch
from headwise.watch._recorder import Recorder
from headwise.watch._request import Request


@torch.no_grad()
def attentions(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    layers: Collection[SupportsIndex] | None = None,
    heads: HeadsLike | None = None,
    queries: Queries = None,
    max_bytes: int = 2 << 30,
) -> tuple[Float[Tensor, "B H T S"] | None, ...] | SimpleNamespace:
    """The exact attention weights of a model, whatever implementation of attention it runs.

    This is what `output_attentions=True` returns under `attn_implementation="eager"`. The model
    runs once, in evaluation mode, on its own kernel; then the weights are computed from its
    queries and keys, a block of rows at a time. A query that may attend to no key (padding on the
    left of a decoder) has weights of zero, where eager attention has uniform ones.

    Args:
        model: Any model that `observe` takes.
        inputs: One batch: a text, several, what a tokenizer returns, a tuple of arguments, or a
            tensor. Texts are padded on the right; each must fit into the model's context.
        tokenizer: The model's tokenizer, for texts; a `SentenceTransformer` has its own.
        layers: The layers, counted from 0 in each stack. None is all of them.
        heads: `"L5.H3"`, `(5, 3)`, a list of either, or `{5: [3]}`. A layer has these heads
            alone, in this order. None is all of them.
        queries: The queries, as columns of the batch: a slice, a list or a number; −1 is the
            last. None is all of them.
        max_bytes: How large the result may be.
    Returns:
        For each layer its weights, from 0 to 1, in the dtype of its queries; None for a layer
        that was not asked for. A model with several stacks gives a tuple for each of them, by the
        last part of its name: `.encoder`, `.decoder` and `.cross`, or `.language` and `.vision`.
    Raises:
        ArgumentError: `layers` and `heads` are both given, a layer or a query does not exist, or
            the result would be larger than `max_bytes`.
        HeadError: a head does not exist.
        UnsupportedError: the model cannot be watched exactly, the queries of a layer are split
            among several calls, or a layer cannot be captured and neither `layers` nor `heads`
            names others.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> [weights] = attentions(layer, torch.randn(1, 5, 8), queries=-1)
        >>> weights.shape
        torch.Size([1, 2, 1, 5])
    """
    if layers is not None and heads is not None:
        raise ArgumentError(
            f"attentions: layers={layers!r} and heads={heads!r}. Give one of them: the name of a "
            f"head says its layer."
        )
    inner = check_model("attentions", model)
    numbers, _ = check_arguments("attentions", layers)
    inputs = _read_inputs(model, inner, inputs, tokenizer)
    if isinstance(inputs, dict):  # some models compute the queries of these logits alone
        inputs.pop("logits_to_keep", None)
    request, rows_of = Request(statistics=(), maps=True), partial(_few_rows, queries)
    recorder = Recorder(inner, request, numbers, rows_of=rows_of)
    explained = text_alone("attentions", inner, inputs)
    with open_watch(recorder) as watch, in_evaluation(inner), explained:
        call_model(inner, inputs, "attentions")
    calls, weights = recorder.recorded.calls, recorder.recorded.weights
    watch._check_complete("attentions", [*calls, *weights])
    uncaptured = recorder.capture.uncaptured.by_name() if layers is None and heads is None else {}
    for name, why in uncaptured.items():
        if why.is_layer:
            raise UnsupportedError(
                f"attentions: {name} has attention that cannot be followed ({why.reason}). Name "
                f"other layers with layers= or heads=, or take what the model itself returns in "
                f"eager mode."
            )
    chosen = _chosen_heads([*calls, *weights], heads)
    rows = {site: ranges_of("attentions", queries, call) for site, call in calls.items()}
    of_head = {site: _bytes(call, rows[site]) for site, call in calls.items()}
    of_head |= {site: part[:, 0].nbytes for site, part in weights.items()}
    size = sum(len(chosen[site]) * of_site for site, of_site in of_head.items())
    if size > max_bytes:  # before any large weights are computed
        raise ArgumentError(
            f"attentions: the weights take {size:,} bytes, and max_bytes={max_bytes:,}. Choose "
            f"queries= (-1 is the last), heads= or layers=, or raise max_bytes. headwise.observe "
            f"gives what they say of each head in memory that grows linearly with the text."
        )
    stacks: dict[str, list[Tensor | None]] = {}
    for site in watch.sites():
        if site.layer >= 0:
            stacks.setdefault(site.stack, []).append(None)
    for site, indices in chosen.items():
        if indices and site in weights:
            stacks[site.stack][site.layer] = weights[site][:, indices]
        elif indices:
            call = calls[site]
            own = weights_of_heads(call, indices, rows[site], call.q.dtype)
            stacks[site.stack][site.layer] = own
    if len(stacks) == 1:
        return tuple(*stacks.values())
    names = {stack: stack.rpartition(".")[2] or "self" for stack in stacks}
    return SimpleNamespace(**{names[stack]: tuple(layers) for stack, layers in stacks.items()})


def _read_inputs(outer: nn.Module, model: nn.Module, inputs: Any, tokenizer: Any) -> Any:
    """The batch of some inputs, which may be texts."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list | tuple) or not any(isinstance(text, str) for text in texts):
        return model_inputs(inputs)
    tokenizer = tokenizer_of(outer, tokenizer, "attentions")
    check_reads_text("attentions", model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"attentions: {type(model).__name__} reads two texts, and inputs={inputs!r:.60}. Give "
            f"the batch of both."
        )
    pieces = [tokens.ids for tokens in token_offsets(tokenizer, list_texts("attentions", texts))]
    check_fits("attentions", model, tokenizer, max(map(len, pieces)))
    return pad(pieces, device_of(model))


def _chosen_heads(sites: Collection[Site], heads: HeadsLike | None) -> dict[Site, list[int]]:
    """The heads of each layer that are asked for, by their index in the layer."""
    if heads is None:
        return {site: list(range(site.n_heads)) for site in sites}
    places = {head: (site, index) for site in sites for index, head in enumerate(site.heads())}
    chosen: dict[Site, list[int]] = {site: [] for site in sites}
    for head in resolve_heads(heads, places):
        site, index = places[head]
        chosen[site].append(index)
    return chosen


def _few_rows(queries: Queries, call: AttentionCall) -> Sequence[range]:
    """The chosen queries of a call, if their weights are smaller than what they follow from.

    Then they alone are computed, kept, and compared with the model's own: the last of 4,096
    queries takes 1.15 of the memory of a plain pass in place of 2.5, and 1.1 of its time, not 1.2.
    """
    if queries is None:
        return ()
    rows = ranges_of("attentions", queries, call)
    inputs = call.q.nbytes + call.k.nbytes + call.v.nbytes
    return rows if call.q.shape[1] * _bytes(call, rows) <= inputs else ()


def _bytes(call: AttentionCall, rows: Sequence[range]) -> int:
    """How large the weights of one head are."""
    return len(call.q) * sum(map(len, rows)) * call.k.shape[2] * call.q.element_size()
