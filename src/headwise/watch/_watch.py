"""Watch a model: totals per head while it runs, nothing left behind when the block ends."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.heads import HeadLike, resolve_heads
from headwise.kernels import weights_of_head
from headwise.models import Call, Inputs, Running, Site, Sites, Text, fingerprint, listen
from headwise.table import HeadTable, Totals
from headwise.watch._collect import collect
from headwise.watch._places import Places, places_across, places_within
from headwise.watch._request import Request

# How far our heads may lie from the model's own before we say that we misread the call.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


@contextmanager
def observe(
    model: nn.Module,
    request: Request | None = None,
    layers: Collection[int] | None = None,
    every: int = 1,
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
        request: What to find out. None is every statistic of `headwise.table.STATISTICS`.
        layers: The layers to watch, counted from 0. None is all of them.
        every: Watch only every n-th forward pass, beginning with the first.
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
    with watch.inputs.follow(), listen(model, watch.hear) as watch.running:
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
        self._totals: dict[Site, dict[str, Totals]] = {}
        self._understood: set[Site] = set()
        self._last: dict[Site, Call] = {}

    def sites(self) -> list[Site]:
        """Where heads attend, in the order of the calls; then where none were heard, and why.

        Each says how it is watched, what computes the model's answer and what its statistics.
        """
        unheard = [] if self.running is None else self._found.unheard(self.running)
        return self._found.all() + unheard

    def table(self) -> HeadTable:
        """The statistics of every head watched so far.

        Raises:
            UnsupportedError: nothing was seen.
            ArgumentError: a layer was asked for that the model does not have.
        """
        self._check_seen()
        sites = sorted(self._totals, key=lambda site: (site.stack, site.layer))
        totals = {
            name: _stack([self._totals[site][name] for site in sites])
            for name in self._totals[sites[0]]
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
        taken, self._totals = self._totals, {}
        return {site: taken[site] for site in sorted(taken, key=lambda s: (s.stack, s.layer))}

    @torch.no_grad()
    def weights(self, head: HeadLike, rows: range | None = None) -> Float[Tensor, "B R S"]:
        """The exact weights of one head on the last batch, for some queries or all of them.

        Zeros stand where a query may not attend. The matrix is made for this head alone.

        Args:
            head: `"L5.H3"`, `(5, 3)` or a `Head`.
            rows: The queries. None is all of them, and the result holds `T` x `S` numbers.
        Raises:
            ArgumentError: the request did not ask for maps, or rows lie outside the text.
            HeadError: there is no such head.
        """
        if not self._request.maps:
            raise ArgumentError("Watch.weights: maps=False. Observe with Request(maps=True).")
        known = {one: site for site in self._last for one in site.heads()}
        address = resolve_heads(head, known)[0]
        call = self._last[known[address]]
        T = call.q.shape[2]
        if rows is not None and not (0 <= rows.start <= rows.stop <= T and rows.step == 1):
            raise ArgumentError(f"Watch.weights: {rows} in a text of {T}. Stay within it.")
        return weights_of_head(call.q, call.k, call.rule, address.head, rows)

    def hear(self, call: Call) -> None:
        """Take in one attention call; `observe` sees to it that this is called."""
        # In a backward pass, checkpointed layers run again: they have been counted already.
        again = torch._C._current_graph_task_id() != -1 and not self.inputs.inside
        if again or max(0, self.inputs.passes - 1) % self._every:
            return
        site = self._found.of(call, self.inputs.passes)
        if self._layers is not None and site.layer not in self._layers:
            return
        if self._request.maps:
            self._last[site] = call
        text, places = self._read(site, call)
        ask = call.exact and site not in self._understood
        with torch.autocast(call.q.device.type, enabled=False):  # it would round sums of ours, too
            found, heads = collect(call, places, text, self._request, heads_too=ask)
        if heads is not None:
            heads = heads if call.join is None else call.join(heads.to(call.heads.dtype))
            _compare(site, call.heads, heads, places)
            self._understood.add(site)
        known = self._totals.setdefault(site, {})
        for name, totals in found.items():
            known[name] = known[name] + totals if name in known else totals

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

    def _check_seen(self) -> None:
        if not self._totals:
            passes = self.inputs.passes
            raise UnsupportedError(
                f"observe: no attention call was seen in {passes} forward passes of "
                f"{type(self._model).__name__}. {self._advice()}"
            )
        missing = set(self._layers or ()) - {site.layer for site in self._totals}
        if missing:
            raise ArgumentError(
                f"observe: layers {sorted(missing)} were not seen. "
                f"There are {len(self._found.all())}, counted from 0."
            )


def _stack(parts: list[Totals]) -> Totals:
    """The totals of several sites, one below the other."""
    return Totals.beside(parts)


def _compare(site: Site, theirs: Tensor, ours: Tensor, places: Places) -> None:
    """Refuse a call whose heads don't follow from what was understood of it."""
    real = places.query_real[:, None, :, None]
    if theirs.shape == ours.shape:
        gap = torch.where(real, theirs.to(ours.dtype) - ours, 0.0).abs().max().item()
        size = torch.where(real, ours, 0.0).abs().max().item()
        if gap <= _TOLERANCE.get(theirs.dtype, 1e-4) * max(size, 1e-6):
            return
        found = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        found = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute what was understood of it: its "
        f"heads and ours {found}. Leave its layer out with layers=, and please report it."
    )
