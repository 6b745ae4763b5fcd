"""Where a call of attention belongs in its model and in the texts of a pass."""

from typing import NamedTuple

from headwise.models import AttentionCall, ModuleCall, Site, StackInputs


class CallPlace(NamedTuple):
    """Where a call belongs: its site, what the site's stack reads, and the call of its module."""

    site: Site
    inputs: StackInputs
    module_call: ModuleCall | None

    @property
    def tokens(self) -> int | None:
        """The number of tokens that the stack reads in this pass."""
        return self.inputs.text.tokens

    def kind(self, call: AttentionCall) -> str:
        """How keys relate to queries: of another text, of the same, or condensed.

        A model that drops or pools tokens leaves their positions unknown.
        """
        if self.site.cross:
            return "cross"
        T, S, tokens = call.q.shape[2], call.k.shape[2], self.tokens
        received = self.module_call.inputs if self.module_call is not None else []
        # More keys than queries come from a cache, unless the module received them all.
        condensed = T > S or (T < S and bool(received) and received[0].shape[1] == S)
        return "condensed" if condensed or (tokens is not None and tokens > T) else "within"
