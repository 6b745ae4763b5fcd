"""Which share of a text's queries was captured, and which calls attend to no text at all."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn

from headwise.models.capture._active_modules import ModuleCall, heads_of
from headwise.models.capture._call import AttentionCall
from headwise.models.capture._sites import Site

Shape = tuple[int, ...]


@dataclass(slots=True)
class Covered:
    """How many queries were captured, and how many tokens the module received.

    Attributes:
        window: Tokens per window, where each window counts as a text; 0: no windows.
    """

    captured: int
    tokens: int
    window: int = 0

    def __add__(self, more: "Covered") -> "Covered":
        window = max(self.window, more.window)
        return Covered(self.captured + more.captured, self.tokens + more.tokens, window)

    def __str__(self) -> str:
        if self.captured < self.tokens:
            return f"{self.captured} queries for {self.tokens} tokens"
        return f"windows of {self.window} tokens, each as a text" if self.window else "all queries"


class Coverage:
    """The coverage of each site, summed over all its calls."""

    def __init__(self) -> None:
        self._sums: dict[Site, Covered] = {}
        self._latest: dict[Site, Covered] = {}

    def add(
        self, site: Site, call: AttentionCall, module_call: ModuleCall | None, tokens: int | None
    ) -> None:
        """Count the queries of a call. Calls within one call of a module share its tokens."""
        covered = _covered(call, module_call, tokens)
        is_repeat = module_call is not None and not _is_first(module_call, site)
        if is_repeat:
            covered = Covered(covered.captured, 0, covered.window)
        self._latest[site] = self._latest[site] + covered if is_repeat else covered
        self._sums[site] = self._sums.get(site, Covered(0, 0)) + covered

    def of(self, site: Site) -> Covered:
        """The coverage of a site over all its calls."""
        return self._sums.get(site, Covered(0, 0))

    def latest(self, site: Site) -> str:
        """The coverage of the latest call of a site's module, as text; empty if not watched."""
        return str(self._latest[site]) if site in self._latest else ""


def reason_unsupported(
    call: AttentionCall, module_call: ModuleCall | None, tokens: int | None
) -> str | None:
    """Why a call is not attention between the tokens of a text; None if it is.

    The shapes of the module's inputs decide: a layer that receives windows attends within texts.
    """
    shape = _input_shape(module_call)
    H, T, S = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    if shape is not None and shape[1] > T and T not in shape and _are_chunks(call.module, H):
        return f"not supported: attends among {T} positions where it was given {shape[1]} tokens"
    if shape is None or T in (tokens, *shape[1:]):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return f"not supported: attends among {T} channels of each head, not among tokens"
    windows = call.q.shape[0] * T == shape[0] * shape[1]
    if shape[1] > T and T not in shape and T == S and not windows:
        return f"not supported: attends among {T} positions where it was given {shape[1]} tokens"
    return None


def _are_chunks(module: nn.Module, H: int) -> bool:
    """Whether `H` heads are several chunks of the heads that a module declares."""
    heads = heads_of(module)
    return 1 < heads < H and H % heads == 0


def _covered(call: AttentionCall, module_call: ModuleCall | None, tokens: int | None) -> Covered:
    B, T = call.q.shape[0], call.q.shape[2]
    shape = _input_shape(module_call)
    if shape is not None and T not in shape and shape[1] > T:
        if shape[0] * shape[1] == B * T:
            return Covered(B * T, B * T, T)
        return Covered(B * T, B * shape[1])
    if tokens is not None and tokens > T:  # latents or pooled positions instead of tokens
        return Covered(B * T, B * tokens)
    return Covered(B * T, B * T)


def _input_shape(module_call: ModuleCall | None) -> Shape | None:
    return None if module_call is None or not module_call.inputs else module_call.inputs[0].shape


def _is_first(module_call: ModuleCall, site: Hashable) -> bool:
    is_first = site not in module_call.counted
    module_call.counted.add(site)
    return is_first
