"""Watch a model: totals per head while it runs, nothing left behind when the block ends."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from headwise._display import counted
from headwise._interrupts import reversible
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Site, capture_calls, check_model, fingerprint, originals_of
from headwise.tables import HeadLike, HeadTable, Totals
from headwise.watch._accumulator import Accumulator
from headwise.watch._maps import Layer, Rows, TopKeys
from headwise.watch._pairs import TextPairs
from headwise.watch._recorder import Recorder
from headwise.watch._request import Request


@reversible
def observe(
    model: nn.Module,
    request: Request | None = None,
    layers: Collection[int] | None = None,
    every: int = 1,
    exact: bool = True,
) -> Iterator["Watch"]:
    """Watch every head of a model while the block runs.

    The model computes its own answer, with its own kernel, and that answer is equal to the
    last bit; statistics are a second pass over the same queries and keys, in memory that
    grows with the text and not with its square. Padding (`attention_mask`) is neither a
    query, a key nor a position. At the first call of each layer the heads that follow from
    what was understood are compared with the model's own: a call that is misread is refused.

    Watched are layers of this library, Hugging Face models, `nn.MultiheadAttention`, and modules
    that call `scaled_dot_product_attention` or write the softmax out; of these last the largest
    logit is known where logits are scaled products and a mask, and NaN where more was added, or
    under `torch.inference_mode()`. `nn.MultiheadAttention` and
    `nn.TransformerEncoder` are kept out of their private fast path (evaluation without gradients)
    and give what they give outside it; `sites()` says so. Modules are left as they were, also
    after an exception; a copy that is made or saved meanwhile is not watched.

    Args:
        model: Any model with such layers, or a `SentenceTransformer` around one.
        request: What to find out. None is a `Request()`: what is cheap and of any text.
        layers: The layers to watch, counted from 0 in each stack, in the order in which they
            attend. None is all of them.
        every: Watch only every n-th forward pass, beginning with the first. Under gradient
            accumulation each micro-batch is a forward pass.
        exact: False lets the pass that takes the statistics also compute the answer, equal to
            rounding, which saves the model's own: once the first call of a site was understood,
            in place of a fused kernel called through Hugging Face's interface or as
            `scaled_dot_product_attention`, without gradients, dropout or a compiler. Everywhere
            else the model answers itself. `sites()` says who answered, under `kernel`.
    Yields:
        The watch; its table can be read during the block and after it.
    Raises:
        ArgumentError: the model is none, `every` is below 1, or `layers` are not numbers from 0
            on.
        UnsupportedError: a call cannot be read exactly.

    Example:
        >>> import torch
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with observe(layer) as watch:
        ...     out = layer(torch.randn(1, 5, 8), causal=True)
        >>> [str(head) for head in watch.table().heads]
        ['L0.H0', 'L0.H1']
    """
    model = check_asked("observe", model, layers, every)
    if not isinstance(request, Request | None):
        raise ArgumentError(f"observe: request={request!r}. Give a Request(...).")
    watch = Watch(model, request or Request(), layers, every)
    hearing = watch.hearing
    answer = None if exact else hearing.answer
    with hearing.inputs.follow(), capture_calls(model, hearing.hear, answer) as hearing.running:
        yield watch


def check_asked(who: str, model: Any, layers: Any, every: Any) -> nn.Module:
    """The model to watch, if it is one, layers are numbers and `every` is one.

    Raises:
        ArgumentError: one of them is so.
    """
    model = check_model(who, model)
    if not isinstance(every, int) or every < 1:
        raise ArgumentError(f"{who}: every={every!r}. Give a whole number, 1 or more.")
    if layers is not None and not _are_numbers(layers):
        raise ArgumentError(f"{who}: layers={layers!r}. Give a list of numbers, from 0 on.")
    return model


def _are_numbers(layers: Any) -> bool:
    numbers = isinstance(layers, Collection) and len(layers) > 0
    return numbers and all(isinstance(one, int) and one >= 0 for one in layers)


class Watch:
    """What has been seen of a model so far; made by `observe`."""

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers = layers
        self.hearing = Recorder(model, request, layers, every)

    def __repr__(self) -> str:
        heard = len(self.hearing.found.all())
        return f"Watch of {type(self._model).__name__}: {counted(heard, 'layer')} heard"

    def sites(self) -> list[Site]:
        """Where heads attend, in the order of the calls; then where none were heard, and why.

        Each says how it is watched, what computes the model's answer and what its statistics,
        and which of a text's queries were captured. Attention among channels, or within chunks
        of what the module was given, is listed as not supported.
        """
        hearing = self.hearing
        unheard = hearing.found.unheard(hearing.running)
        return [self._told(site) for site in hearing.found.all()] + unheard

    def _told(self, site: Site) -> Site:
        if self._layers is not None and site.layer not in self._layers:
            return replace(site, watched="not watched: left out by layers=", statistics="")
        kernel = site.kernel
        if site in self.hearing.answered:
            kernel = f"{site.statistics}, instead of {site.kernel}"
        return replace(site, kernel=kernel, coverage=self.hearing.coverage.latest(site))

    def table(self) -> HeadTable:
        """The statistics of every head watched so far.

        Raises:
            UnsupportedError: nothing was seen.
            ArgumentError: a layer was asked for that the model does not have.
        """
        found = self.hearing.ledger.totals()
        self._check_seen(found)
        sites = list(found)
        totals = {
            name: Totals.beside([found[site][name] for site in sites])
            for name in self._request.names
        }
        heads = tuple(head for site in sites for head in site.heads())
        return HeadTable(
            heads=heads,
            kv_heads=np.array(
                [h // (s.n_heads // s.n_kv_heads) for s in sites for h in range(s.n_heads)],
                dtype=np.int64,
            ),
            totals=totals,
            covered=self._covered(sites),
            queries=self._request.queries,
            model=fingerprint(self._model),
            versions={name: version(name) for name in ("headwise", "torch")},
            original=originals_of(self._model, heads),
        )

    def _covered(self, sites: list[Site]) -> Float64[np.ndarray, "2 N"]:
        counts = [self.hearing.coverage.of(site) for site in sites for _ in site.heads()]
        return np.array([[one.captured, one.tokens] for one in counts], dtype=np.float64).T

    def take(self) -> dict[Site, dict[str, Totals]]:
        """What was seen at each site since the last time; from here on it is seen anew."""
        taken = self.hearing.ledger.totals()
        self.hearing.ledger = Accumulator(self._request.per_text)
        return taken

    def pairs(self, **pairs: Sequence[TextPairs]) -> None:
        """Say which pairs (query, key) each text of the next forward pass has.

        Positions count the tokens of a text from 0, padding left out. Texts that share a row are
        told one by one, in their order.

        Args:
            pairs: For each name in the request's `pairs`, the pairs of every text.
        Raises:
            ArgumentError: other names, or in the pass itself another number of texts.
        """
        self.hearing.pairs.give(self.hearing.inputs.passes + 1, pairs)

    def weights(self, head: HeadLike, rows: Rows = None) -> Float[Tensor, "B R S"]:
        """The exact weights of one head on the last batch, for some queries or all of them.

        Zeros stand where a query may not attend; queries that are padding have what the model
        gives them. The matrix is made for this head alone.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            rows: Columns of the batch. None is all, and the result holds `T` x `S` numbers.
        Raises:
            ArgumentError: the request did not ask for maps, or rows lie outside the text.
            HeadError: there is no such head.
        """
        return self.hearing.looks.weights(head, rows)

    def layers(self) -> list[Layer]:
        """Every layer that attends within the text, on the last batch.

        Raises:
            ArgumentError: the request did not ask for maps.
        """
        return self.hearing.looks.layers(self._model)

    def visible(self, head: HeadLike) -> Bool[Tensor, "B T S"]:
        """What each query of a head may attend to on the last batch.

        Raises:
            ArgumentError: the request did not ask for maps.
            HeadError: there is no such head.
        """
        return self.hearing.looks.visible(head)

    def top_keys(self, head: HeadLike, k: int = 5, rows: Rows = None) -> TopKeys:
        """The `k` keys that each query of a head attends to most on the last batch.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            k: How many keys.
            rows: The queries, as columns of the batch. None is all of them.
        Returns:
            Columns of the batch, from the most on, and their weights; −1 and 0 where no further
            key is given any weight.
        Raises:
            ArgumentError: the request did not ask for maps, `k` is not from 1 to the number of
                keys, or rows lie outside the text.
            HeadError: there is no such head.
        """
        return self.hearing.looks.top_keys(head, k, rows)

    def received(self, head: HeadLike) -> Float[Tensor, "B S"]:
        """What each key was given by all queries of the latest texts: a column sum of weights.

        During cached decoding the sums grow with the text. Padding neither gives nor receives.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
        Returns:
            For each column of the batch 0 … the number of queries.
        Raises:
            ArgumentError: the request did not ask for it.
            HeadError: there is no such head.
        """
        return self.hearing.looks.received(head)

    def _advice(self) -> str:
        """What to do when nothing was seen; after a pass, the modules that stayed silent."""
        names = ", ".join(
            f"{site.name or 'the model'} ({site.watched})" for site in self.sites()[:4]
        )
        if not self.hearing.inputs.passes or not names:
            return "Run a model with softmax attention inside the block."
        return f"It cannot be watched: {names}."

    def _check_seen(self, found: Collection[Site]) -> None:
        everywhere = self.hearing.found.all()
        missing = set(self._layers or ()) - {site.layer for site in everywhere}
        if missing and everywhere:
            raise ArgumentError(
                f"observe: layers {sorted(missing)} were not seen. "
                f"There are 0 to {max(site.layer for site in everywhere)}."
            )
        if not found:
            passes = self.hearing.inputs.passes
            raise UnsupportedError(
                f"observe: no attention call was seen in {passes} forward passes of "
                f"{type(self._model).__name__}. {self._advice()}"
            )
