"""The watch of a model: the statistics of its heads so far."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwise._display import counted
from headwise._extras import versions
from headwise._torch_private import without_function_modes
from headwise.capture import AttentionCall, Site
from headwise.checkpoints import originals_of
from headwise.errors import ArgumentError, HeadError, UnsupportedError
from headwise.models import fingerprint, weights_from
from headwise.tables import HeadLike, HeadTable, plot_weights
from headwise.watch._maps import (
    Layer,
    Queries,
    TopKeys,
    in_blocks,
    layer_of,
    ranges_of,
    weights_of_heads,
)
from headwise.watch._pairs import TextPairs
from headwise.watch._positions import NONE
from headwise.watch._recorded import find_head
from headwise.watch._recorder import Recorder
from headwise.watch._spans import TextSpans


class Watch:
    """The statistics of a model's heads so far; made by `observe`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._model, self._request = recorder.model, recorder.request

    def __repr__(self) -> str:
        captured = len(self._recorder.capture.sites.all)
        return f"Watch of {type(self._model).__name__}: {counted(captured, 'layer')} captured"

    def sites(self) -> list[Site]:
        """Where heads attend, in the order of the calls; then where no call was captured, and why.

        Each site says how it is watched, or the `reason` why not, such as attention among
        channels or within chunks of the module's input; what computes the model's output and its
        statistics; and which of a text's queries were captured.
        """
        return self._recorder.sites()

    def table(self) -> HeadTable:
        """The statistics of every head watched so far.

        Raises:
            UnsupportedError: no attention call was captured.
            ArgumentError: `layers` names a layer that the model does not have.
        """
        with without_function_modes():  # which would see every function that this calls
            sites, totals = self._recorder.totals()
            self._check_captured("observe", sites)
            heads = tuple(head for site in sites for head in site.heads())
            kind, covered = weights_from(self._model), self._recorder.recorded.covered
            of_heads = [covered[site][:2] for site in sites for _ in range(site.n_heads)]
            return HeadTable(
                heads=heads,
                kv_heads=np.array([kv for site in sites for kv in site.kv_heads()], dtype=np.int64),
                totals=totals,
                covered=np.array(of_heads, dtype=np.float64).T,
                queries=self._request.queries,
                model=fingerprint(self._model),
                versions=versions() | ({"weights": kind} if kind else {}),
                original=originals_of(self._model, heads),
            )

    def pairs(self, **pairs: Sequence[TextPairs]) -> None:
        """Set the pairs (query, key) of each text of the next forward pass.

        Positions count the tokens of a text from 0, without padding. Texts that share a row are
        listed separately, in their order.

        Args:
            pairs: For each name in the request's `pairs`, the pairs of every text.
        Raises:
            ArgumentError: the names differ from the request, or, in the pass itself, the number of
                texts differs.
        """
        self._recorder.pairs.set(self._recorder.passes + 1, pairs)

    def spans(
        self,
        texts: Sequence[str] | None = None,
        tokenizer: Any = None,
        /,
        *,
        queries: Any = None,
        **stretches: Any,
    ) -> None:
        """Set the named stretches of each text, before the pass that begins the texts.

        They last while a cache continues these texts. A stretch is `(start, end)`, without the
        position `end`; a text may have a list of several of one name. Positions count the tokens
        of a text from 0, without padding; with `texts` and `tokenizer`, its characters. A stretch
        then reaches from the first to the last token that shares a character with it, other than
        white space. A space that the tokenizer puts before a word or a text (a lone "▁", as before
        Chinese) has no character, so that no stretch begins with it. Texts that share a row are
        listed separately. In an encoder-decoder stretches lie in the source and queries in the
        target: cross-attention has both, the encoder has stretches while no queries are named, and
        other statistics of spans are NaN.

        Args:
            texts: The texts themselves, if positions count characters.
            tokenizer: A fast tokenizer of these texts, which gives the tokens that the model reads.
            queries: The queries of each text, as stretches, which may lie beyond the text so far;
                `"last"` (the last token of a text in each pass) or `"generated"` (what is read
                after the first pass), for all texts or in place of one. None is all queries.
            stretches: For each name in the request's `spans`, the stretches of every text.
        Raises:
            ArgumentError: the names differ from the request, a stretch is malformed or has no
                token, or, in the pass itself, the texts differ from those given.
            UnsupportedError: the tokenizer reports no character offsets, or characters are given
                and the model reads no token ids.
        """
        if not stretches:
            raise ArgumentError(
                f"Watch.spans: no stretches were given, but the request has "
                f"spans={self._request.spans}. "
                f"Give name=[(start, end), ...] for each of them."
            )
        spans = TextSpans.of(stretches, queries, texts, tokenizer)
        self._recorder.spans.set(self._recorder.passes + 1, spans)

    def per_query(self, span: str, head: HeadLike) -> list[Float[Tensor, " n"]]:
        """The mass of each query on a named stretch of the latest texts.

        Args:
            span: A name in the request's `spans`.
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
        Returns:
            For each text the masses of its queries that count, in order, from 0 to 1; NaN for a
            query that sees no key of the stretch. Queries read with a cache follow.
        Raises:
            ArgumentError: the request has no such span, or `per_query=False`.
            HeadError: the head does not exist.
        """
        return self._recorder.spans.per_query(span, head)

    @torch.no_grad()
    def weights(self, head: HeadLike, rows: Queries = None) -> Float[Tensor, "B *H R S"]:
        """The exact attention weights of one head, or of all heads of a layer, on the last batch.

        Keys that a query may not attend to have weight 0; padding queries have the weights that
        the model gives them. Only the maps of these heads are computed.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`; `"L5"` is all heads of a layer, along a second
                axis.
            rows: The queries, as columns of the batch: a slice, a list or a number; −1 is the
                last. None is all: a result of `T` x `S` numbers.
        Raises:
            ArgumentError: the request has no maps, or a query does not exist.
            HeadError: the head does not exist.
        """
        calls = self._calls("weights")
        layers = {str(site.heads()[0]).rpartition(".")[0]: site for site in calls}
        layer = layers.get(head) if isinstance(head, str) else None
        if layers and not layer and isinstance(head, str) and "H" not in head:
            first, *_, last = [*layers, *layers]
            raise HeadError(
                f"Watch.weights: {head!r} is neither a head nor a layer that is watched. Write "
                f"'{first}.H0', or a layer from {first} to {last}."
            )
        site, index = find_head(layer.heads()[0] if layer else head, calls)
        parts = ranges_of("Watch.weights", rows, calls[site])
        heads = range(layer.n_heads) if layer else [index]
        weights = weights_of_heads(calls[site], heads, parts)
        return weights if layer else weights[:, 0]

    def plot(
        self,
        head: HeadLike,
        *,
        text: int = 0,
        tokens: Sequence[str] | None = None,
        ax: Any = None,
    ) -> Any:
        """Draw the attention weights of one head on a text of the last batch.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            text: The row of the batch, from 0.
            tokens: The tokens of this text, one per column of the batch, to stand along the axes:
                `tokenizer.convert_ids_to_tokens(ids)`. None shows numbers.
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes, with a row per query and a column per key.
        Raises:
            ArgumentError: the request has no maps, there is no such text, `tokens` are not one per
                key, or `ax` is not axes.
            HeadError: the head does not exist.
            MissingPackageError: matplotlib is not installed.
        """
        weights = self.weights(head)
        if not 0 <= text < len(weights):
            raise ArgumentError(
                f"Watch.plot: text={text}. The last batch has texts 0 to {len(weights) - 1}."
            )
        if tokens is not None and len(tokens) != weights.shape[-1]:
            raise ArgumentError(
                f"Watch.plot: {len(tokens)} tokens for {weights.shape[-1]} keys. Give one per key."
            )
        drawn = weights[text].float().cpu().numpy()
        return plot_weights("Watch.plot", drawn, str(head), ax, tokens)

    def _check_complete(self, caller: str, sites: Collection[Site]) -> None:
        self._check_captured(caller, sites)
        for site in sites:
            covered = self._recorder.recorded.covered[site]
            if covered.captured < covered.tokens:
                raise UnsupportedError(
                    f"{caller}: {site} attends in several parts ({covered}), and no call "
                    f"holds all of its weights. Leave its layer out with layers=."
                )

    def layers(self) -> list[Layer]:
        """Every layer with self-attention, on the last batch.

        Raises:
            ArgumentError: the request has no maps.
        """
        calls = self._calls("layers")
        order = sorted(calls, key=lambda site: (site.stack, site.layer))
        found = self._recorder.projections.found
        return [layer_of(site, calls[site], found.get(site)) for site in order if not site.cross]

    @torch.no_grad()
    def top_keys(self, head: HeadLike, k: int = 5, rows: Queries = None) -> TopKeys:
        """The `k` keys that each query of a head attends to most on the last batch.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            k: How many keys.
            rows: The queries, as for `weights`.
        Returns:
            Columns of the batch in descending order of weight, and their weights; −1 and 0 if no
            further key has any weight.
        Raises:
            ArgumentError: the request has no maps, `k` is not from 1 to the number of
                keys, or a query does not exist.
            HeadError: the head does not exist.
        """
        calls = self._calls("top_keys")
        site, index = find_head(head, calls)
        call, S = calls[site], calls[site].k.shape[2]
        if not 1 <= k <= S:
            raise ArgumentError(f"Watch.top_keys: k={k} among {S} keys. Give 1 to {S}.")
        parts = ranges_of("Watch.top_keys", rows, call) or [range(0)]
        blocks = [x.topk(k, dim=-1) for part in parts for x in in_blocks(call, index, part)]
        weights = torch.cat([block.values for block in blocks], 1)
        keys = torch.cat([block.indices for block in blocks], 1)
        return TopKeys(keys.masked_fill(weights == 0, NONE), weights)

    def received(self, head: HeadLike) -> Float[Tensor, "B S"]:
        """The attention each key received from all queries of the latest texts: column sums.

        During cached decoding the sums grow with the text. Padding is left out.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
        Returns:
            A number for each column of the batch, from 0 to the number of queries.
        Raises:
            ArgumentError: the request has `received=False`.
            HeadError: the head does not exist.
        """
        if not self._request.received:
            raise ArgumentError(
                "Watch.received: received=False. Observe with Request(received=True)."
            )
        site, index = find_head(head, self._recorder.recorded.received)
        return self._recorder.recorded.received[site][1][:, index]

    def _calls(self, method: str) -> dict[Site, AttentionCall]:
        """The last call of each site."""
        if not self._request.maps:
            raise ArgumentError(f"Watch.{method}: maps=False. Observe with Request(maps=True).")
        return self._recorder.recorded.calls

    def _check_captured(self, caller: str, watched: Collection[Site]) -> None:
        """Refuse layers that do not exist, and a watch without a call."""
        sites = self._recorder.capture.sites.all
        missing = set(self._recorder.layers or ()) - {site.layer for site in sites}
        if missing and sites:
            raise ArgumentError(
                f"{caller}: layers {sorted(missing)} do not exist. "
                f"There are 0 to {max(site.layer for site in sites)}."
            )
        if not watched:
            passes, first = self._recorder.passes, self.sites()[:4]
            advice = "Run a model with softmax attention inside the block."
            if passes and first:
                names = ", ".join(f"{site} ({site.reason})" for site in first)
                advice = f"It cannot be watched: {names}."
            raise UnsupportedError(
                f"{caller}: no attention call was captured in {passes} forward passes of "
                f"{type(self._model).__name__}. {advice}"
            )
