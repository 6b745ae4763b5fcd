"""Watch a model: totals per head while it runs, nothing left behind when the block ends."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.heads import HeadLike
from headwise.kernels import RowStatistics
from headwise.models import (
    Call,
    Inputs,
    Running,
    Site,
    Sites,
    Text,
    fingerprint,
    listen,
    output_projection,
)
from headwise.table import HeadTable, Totals
from headwise.watch._collect import Heard, collect
from headwise.watch._compare import compare
from headwise.watch._ledger import Ledger, Sums
from headwise.watch._looks import Looks, Rows, TopKeys
from headwise.watch._pairs import Pairs, TextPairs
from headwise.watch._places import Places, places_across, places_within
from headwise.watch._request import Request


@contextmanager
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
    logit is known where logits are scaled products and a mask, and NaN where more was added.
    `nn.MultiheadAttention` and
    `nn.TransformerEncoder` are kept out of their private fast path (evaluation without gradients)
    and give what they give outside it; `sites()` says so. Modules are left as they were, also
    after an exception.

    Args:
        model: Any model with such layers.
        request: What to find out. None is a `Request()`: what is cheap and of any text.
        layers: The layers to watch, counted from 0. None is all of them.
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
        ArgumentError: `every` is below 1.
        UnsupportedError: a call cannot be read exactly.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with observe(layer) as watch:
        ...     out = layer(torch.randn(1, 5, 8), causal=True)
        >>> [str(head) for head in watch.table().heads]
        ['L0.H0', 'L0.H1']
    """
    if every < 1:
        raise ArgumentError(f"observe: every={every}. Give 1 or more.")
    watch = Watch(model, request or Request(), layers, every)
    answer = None if exact else watch.answer
    with watch.inputs.follow(), listen(model, watch.hear, answer) as watch.running:
        yield watch


class Watch:
    """What has been seen of a model so far; made by `observe`."""

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every = layers, every
        self._found = Sites(model)
        self.inputs = Inputs(model, self._found.stacks.roots)
        self.running: Running | None = None
        self._ledger = Ledger(request.per_text)
        self._pairs = Pairs(request)
        self._looks = Looks(request.maps, request.received)
        self._understood: set[Site] = set()
        self._answered: set[Site] = set()

    def sites(self) -> list[Site]:
        """Where heads attend, in the order of the calls; then where none were heard, and why.

        Each says how it is watched, what computes the model's answer and what its statistics.
        """
        unheard = [] if self.running is None else self._found.unheard(self.running)
        heard = [
            replace(site, kernel=f"{site.statistics}, instead of {site.kernel}")
            if site in self._answered
            else site
            for site in self._found.all()
        ]
        return heard + unheard

    def table(self) -> HeadTable:
        """The statistics of every head watched so far.

        Raises:
            UnsupportedError: nothing was seen.
            ArgumentError: a layer was asked for that the model does not have.
        """
        found = self._ledger.totals()
        self._check_seen(found)
        sites = list(found)
        totals = {
            name: Totals.beside([found[site][name] for site in sites])
            for name in self._request.names
        }
        return HeadTable(
            heads=tuple(head for site in sites for head in site.heads()),
            kv_heads=np.array(
                [h // (s.n_heads // s.n_kv_heads) for s in sites for h in range(s.n_heads)],
                dtype=np.int64,
            ),
            totals=totals,
            model=fingerprint(self._model),
            versions={name: version(name) for name in ("headwise", "torch")},
        )

    def take(self) -> dict[Site, dict[str, Totals]]:
        """What was seen at each site since the last time; from here on it is seen anew."""
        taken = self._ledger.totals()
        self._ledger = Ledger(self._request.per_text)
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
        self._pairs.give(self.inputs.passes + 1, pairs)

    def weights(self, head: HeadLike, rows: Rows = None) -> Float[Tensor, "B R S"]:
        """The exact weights of one head on the last batch, for some queries or all of them.

        Zeros stand where a query may not attend. The matrix is made for this head alone.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            rows: Columns of the batch. None is all, and the result holds `T` x `S` numbers.
        Raises:
            ArgumentError: the request did not ask for maps, or rows lie outside the text.
            HeadError: there is no such head.
        """
        return self._looks.weights(head, rows)

    def visible(self, head: HeadLike) -> Bool[Tensor, "B T S"]:
        """What each query of a head may attend to on the last batch.

        Raises:
            ArgumentError: the request did not ask for maps.
            HeadError: there is no such head.
        """
        return self._looks.visible(head)

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
        return self._looks.top_keys(head, k, rows)

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
        return self._looks.received(head)

    def hear(self, call: Call) -> None:
        """Take in one attention call; `observe` sees to it that this is called."""
        if self._passes_over():
            return
        site = self._found.of(call, self.inputs.passes)
        if self._layers is not None and site.layer not in self._layers:
            return
        # What listens for attention need not listen to what is computed about it.
        with torch._C.DisableTorchFunction():
            self._take_in(site, call)

    def _take_in(self, site: Site, call: Call) -> None:
        heard = self._heard(site, call)
        ask = call.exact and site not in self._understood
        sums, rows = self._collect(heard, heads_too=ask)
        if ask and rows.heads is not None:
            ours = rows.heads if call.join is None else call.join(rows.heads.to(call.heads.dtype))
            compare(site, call.heads, ours, rows.lse, heard.places)
            self._understood.add(site)
        self._enter(site, heard, sums, rows)

    def answer(self, call: Call) -> Float[Tensor, "B H T Dv"] | None:
        """Take in a call that the model has not answered, and give its heads; or neither."""
        site = self._found.known(call, self.inputs.passes)
        if site not in self._understood or self._passes_over():
            return None
        if self._layers is not None and site.layer not in self._layers:
            return None
        site = self._found.of(call, self.inputs.passes)
        with torch._C.DisableTorchFunction():
            heard = self._heard(site, call)
            sums, rows = self._collect(heard, heads_too=True)
            self._enter(site, heard, sums, rows)
        self._answered.add(site)
        return None if rows.heads is None else rows.heads.to(call.q.dtype)

    def _passes_over(self) -> bool:
        """Whether nothing is watched just now."""
        # In a backward pass, checkpointed layers run again: they have been counted already.
        again = torch._C._current_graph_task_id() != -1 and not self.inputs.inside
        return again or max(0, self.inputs.passes - 1) % self._every > 0

    def _collect(self, heard: Heard, heads_too: bool) -> tuple[Sums, RowStatistics]:
        # Autocast would round sums of ours, too.
        with torch.autocast(heard.call.q.device.type, enabled=False):
            return collect(heard, self._request, heads_too)

    def _enter(self, site: Site, heard: Heard, sums: Sums, rows: RowStatistics) -> None:
        self._ledger.enter(site, sums)
        self._looks.take(site, heard.call, heard.first, rows.received)

    def _heard(self, site: Site, call: Call) -> Heard:
        text, places = self._read(site, call)
        passes = self.inputs.passes
        return Heard(
            call=call,
            places=places,
            text=text,
            first=self._ledger.begin(site, places, passes),
            pairs=self._pairs.columns(places, text, passes),
            per_head=self._per_head(site) if self._request.needs_projection else None,
        )

    def _per_head(self, site: Site) -> Float[Tensor, "H Dv d_model"]:
        projection = output_projection(self._model, site)
        if projection is None:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site.name}, "
                f"which was not found. Ask for neither, or leave its layer out with layers=."
            )
        return projection.per_head

    def _read(self, site: Site, call: Call) -> tuple[Text, Places]:
        reading = self.inputs.of(site.stack)
        if site.cross:
            keys = reading.other.filled(Text(real=call.real))
            return reading.own, places_across(call, reading.own, keys)
        if reading.own.real is None and call.real is not None:
            self.inputs.learn(site.stack, call.real)
        queries = reading.own.filled(Text(real=call.real))
        return queries, places_within(call, queries)

    def _advice(self) -> str:
        """What to do when nothing was seen; after a pass, the modules that stayed silent."""
        names = ", ".join(
            f"{site.name or 'the model'} ({site.watched})" for site in self.sites()[:4]
        )
        if not self.inputs.passes or not names:
            return "Run a model with softmax attention inside the block."
        return f"It cannot be watched: {names}."

    def _check_seen(self, found: Collection[Site]) -> None:
        if not found:
            passes = self.inputs.passes
            raise UnsupportedError(
                f"observe: no attention call was seen in {passes} forward passes of "
                f"{type(self._model).__name__}. {self._advice()}"
            )
        missing = set(self._layers or ()) - {site.layer for site in found}
        if missing:
            raise ArgumentError(
                f"observe: layers {sorted(missing)} were not seen. "
                f"There are {len(self._found.all())}, counted from 0."
            )
