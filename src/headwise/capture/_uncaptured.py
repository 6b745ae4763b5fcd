"""Which modules of a model should attend but were not captured, and why."""

from collections.abc import Collection, Mapping

from torch import nn

from headwise.capture._attention_modules import cross_by_name, is_attention
from headwise.capture._site import Site
from headwise.capture._stacks import stack_of
from headwise.capture._unsupported import Unsupported

_NO_ATTENTION = "a softmax that is not attention"
_NO_SOFTMAX = "called, but without a softmax over queries and keys in this thread"
_NOT_CALLED = "not called"


class Uncaptured:
    """What is known of modules whose attention is not captured, by their identities.

    Attributes:
        called: Those that were called and whose name says that they attend.
        unsupported: Why attention of a module cannot be captured.
        other_softmax: Those with a softmax that is not attention.

    Args:
        modules: The modules of the model.
        names: Their names.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        names: Mapping[int, str],
        stacks: Mapping[str, str],
    ) -> None:
        self._modules, self._names, self._stacks = modules, names, stacks
        self.called: set[int] = set()
        self.unsupported: dict[int, Unsupported] = {}
        self.other_softmax: set[int] = set()

    def note_called(self, module: nn.Module, *_: object) -> None:
        self.called.add(id(module))

    def are_all_called(self, captured: Collection[Site]) -> bool:
        """Whether every module that should attend was called."""
        # Asked at each step of training; to tell what is near what was captured takes milliseconds.
        uncalled = (module for key, module in self._modules.items() if key not in self.called)
        if not any(map(is_attention, uncalled)):
            return True
        return all(site.reason != _NOT_CALLED for site in self.sites(captured))

    def by_name(self) -> dict[str, Unsupported]:
        """Modules whose attention cannot be captured, and why."""
        why = self.unsupported
        return {name: why[key] for key, name in self._names.items() if key in why}

    def sites(self, captured: Collection[Site]) -> list[Site]:
        """The modules that should attend, each with its name and the reason."""
        names = self._names
        reasons = {name: why.reason for name, why in self.by_name().items()}
        known = [*reasons, *(site.name for site in captured)]
        silent: list[str] = []
        for key, name in names.items():  # outer modules come first
            near = any(_inside(name, place) or _inside(place, name) for place in known + silent)
            if is_attention(self._modules[key]) and not near:
                silent.append(name)
                reasons[name] = _NO_SOFTMAX if key in self.called else _NOT_CALLED
        for key, name in names.items():
            if key in self.other_softmax:
                reasons.setdefault(name, _NO_ATTENTION)
        return [
            Site(name, stack_of(self._stacks, name, bool(cross_by_name(name))), reason=reason)
            for name, reason in reasons.items()
        ]


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or outer == ""
