"""Which part of a text's queries was captured, and which calls attend to no text at all."""

from collections.abc import Hashable
from dataclasses import dataclass

from headwise.models.capture._active_modules import ModuleCall, heads_of
from headwise.models.capture._call import AttentionCall
from headwise.models.capture._sites import Site

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Covered:
    """How many queries were captured, and how many tokens the module was given to attend with.

    Attributes:
        window: How many tokens each window holds, where windows count as texts; 0: no windows.
    """

    captured: int
    tokens: int
    window: int = 0

    def __add__(self, other: "Covered") -> "Covered":
        window = max(self.window, other.window)
        return Covered(self.captured + other.captured, self.tokens + other.tokens, window)

    def __str__(self) -> str:
        if self.captured < self.tokens:
            return f"{self.captured} queries for {self.tokens} tokens"
        return f"windows of {self.window} tokens, each as a text" if self.window else "all queries"


class Coverage:
    """Sums over all calls, by site."""

    def __init__(self) -> None:
        self._sums: dict[Site, Covered] = {}
        self._latest: dict[Site, Covered] = {}

    def enter(
        self, site: Site, call: AttentionCall, run: ModuleCall | None, tokens: int | None
    ) -> None:
        """Count the queries of a call; the calls of one run of a module share its tokens."""
        covered = _covered(call, run, tokens)
        again = run is not None and not _first_of(run, site)
        if again:
            covered = Covered(covered.captured, 0, covered.window)
        self._latest[site] = self._latest[site] + covered if again else covered
        self._sums[site] = self._sums.get(site, Covered(0, 0)) + covered

    def of(self, site: Site) -> Covered:
        """Over all calls; all where nothing was counted."""
        return self._sums.get(site, Covered(0, 0))

    def latest(self, site: Site) -> str:
        """What the latest run of a site covered, in words; empty for one that was not watched."""
        return str(self._latest[site]) if site in self._latest else ""


def unsupported(call: AttentionCall, run: ModuleCall | None, tokens: int | None) -> str | None:
    """Why a call is no attention between the tokens of a text; None where it is.

    Judged by what the module was given: a layer that is handed windows attends within texts.
    """
    shape = _given(run)
    H, T, S = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    if shape is None or T in (tokens, *shape[1:]):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return f"not supported: attends among {T} channels of each head, not among tokens"
    heads = heads_of(call.module)
    chunks = 1 < heads < H and H % heads == 0
    windows = call.q.shape[0] * T == shape[0] * shape[1]
    if shape[1] > T and T not in shape and (chunks or (T == S and not windows)):
        return f"not supported: attends among {T} positions where it was given {shape[1]} tokens"
    return None


def _covered(call: AttentionCall, run: ModuleCall | None, tokens: int | None) -> Covered:
    B, T = call.q.shape[0], call.q.shape[2]
    shape = _given(run)
    if shape is not None and T not in shape and shape[1] > T:
        if shape[0] * shape[1] == B * T:
            return Covered(B * T, B * T, T)
        return Covered(B * T, B * shape[1])
    if tokens is not None and tokens > T:  # latents or pooled positions in place of tokens
        return Covered(B * T, B * tokens)
    return Covered(B * T, B * T)


def _given(run: ModuleCall | None) -> Shape | None:
    return None if run is None or not run.texts else tuple(run.texts[0].shape)


def _first_of(run: ModuleCall, site: Hashable) -> bool:
    first = site not in run.counted
    run.counted.add(site)
    return first
