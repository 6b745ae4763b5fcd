"""Which calls of a compiled model its graphs hand over, and whether they have handed over all."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from headwise.capture import AttentionCall, Site, may_follow, may_stand_at
from headwise.errors import UnsupportedError
from headwise.watch._pass import Pass


class Graphs:
    """The sites whose calls an operator in a compiled graph can hand over.

    Attributes:
        sites: The module of each site, and what makes a call of what its operator is given; None
            if a graph cannot hand over its calls.
    """

    def __init__(self) -> None:
        self.sites: dict[Site, tuple[nn.Module, Callable[..., Any]] | None] = {}
        # The passes of graphs so far, and those in which each site has called once.
        self._passes, self._calls = 0, Counter[Site]()

    def add_site(self, site: Site, call: AttentionCall, is_alike: bool) -> None:
        """Add a site with its first call; `is_alike`: an operator would tell the same of it."""
        describe = call.in_graph if is_alike and may_follow(call) else None
        self.sites[site] = None if describe is None else (call.module, describe)

    def can_follow(self, sites: Collection[Site]) -> bool:
        """Whether graphs can hand over the calls of these sites, each of a module of its own."""
        known = filter(None, map(self.sites.get, sites))
        modules = {id(module) for module, _ in known if may_stand_at(module)}
        return 0 < len(sites) == len(modules)

    def add(self, pass_: Pass) -> None:
        """Count the calls of a pass, if a graph has handed over any of them.

        Another pass shows which sites attend in several calls, such as an image each.
        """
        if pass_.is_in_graph:
            self._passes += 1
            self._calls.update(site for site, n in pass_.calls.items() if n == 1)
        else:
            self.sites.update({site: None for site, n in pass_.calls.items() if n > 1})

    def check(self, sites: Collection[Site]) -> None:
        """Refuse passes in which a graph has not handed over every call.

        Raises:
            UnsupportedError: a site has not called once in each of these passes.
        """
        for site in sites:
            n = self._calls[site]
            if n != self._passes:
                raise UnsupportedError(
                    f"observe: {site} has recorded its call in {n} of {self._passes} passes that "
                    f"ran compiled. Its graph cannot hand it over, a pass has failed, or two "
                    f"threads ran at once. Watch the model uncompiled: "
                    f"torch.compiler.set_stance('force_eager')."
                )

    def clear(self) -> None:
        """Begin to count again."""
        self._passes = 0
        self._calls.clear()
