"""The sites of a model: each is found by the module that attends, and how often it has."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from headwise.capture._attention_modules import cross_by_name
from headwise.capture._call import AttentionCall
from headwise.capture._running_calls import ModuleCall, RunningCalls
from headwise.capture._site import Site
from headwise.capture._stacks import stack_of
from headwise.models import first_head_of


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass.

    Attributes:
        thread: The one that runs it; None while the whole model does not run.
        part: Otherwise, the number of the call of a part of the model that runs by itself.
        times: By module, how often it has attended, and the number of its latest call.
    """

    thread: int | None = None
    part: int | None = None
    times: dict[int, tuple[int, int]] = field(default_factory=dict)


class Sites:
    """The sites of a model, numbered in the order of their first calls.

    A module that is called several times in one pass, such as a shared layer, has one site for each
    call. But calls on parts of the same queries share a site: an image tower may attend within one
    image after the other.

    Args:
        names: The names of the model's modules, by their identities.
        running: The calls of modules that have not returned.
    """

    def __init__(
        self, names: Mapping[int, str], stacks: Mapping[str, str], running: RunningCalls
    ) -> None:
        self._names, self._stacks, self._running = names, stacks, running
        self._known: dict[tuple[int, int], Site] = {}
        self._pass = _Pass()

    @property
    def all(self) -> list[Site]:
        """The sites of all calls so far, in the order of their first calls."""
        return list(self._known.values())

    @property
    def thread(self) -> int | None:
        """The thread that runs a pass of the whole model; None if none runs."""
        return self._pass.thread

    def begin_pass(self, thread: int | None) -> None:
        """Begin a pass of the whole model in a thread, or of parts of it: None."""
        self._pass = _Pass(thread)

    def of(self, call: AttentionCall) -> Site:
        """The site of a call, added if it is new."""
        key = self._key(call.module, call.q, call.module_call)
        if key not in self._known:
            self._known[key] = self._new_site(call)
        return self._known[key]

    def known(self, module: nn.Module, q: Tensor, module_call: ModuleCall | None) -> Site | None:
        """The site of a call by its module and queries; None if it is new."""
        return self._known.get(self._key(module, q, module_call))

    def _key(self, module: nn.Module, q: Tensor, module_call: ModuleCall | None) -> tuple[int, int]:
        """The identity of a module, and how often it attended earlier in this pass."""
        if self.thread is None:  # a part of the model that is called by itself is a pass, too
            for outermost in deque(self._running, maxlen=1):
                self._running.keep(outermost)
                if outermost.number != self._pass.part:
                    self._pass = _Pass(part=outermost.number)
        times, latest = self._pass.times.get(id(module), (0, -1))
        number = 0 if module_call is None else module_call.number
        if number != latest or not (module_call is None or _share_memory(module_call.queries, q)):
            times += 1
            self._pass.times[id(module)] = times, number
        if module_call is not None:
            module_call.queries = q  # kept alive, so that its memory is not reused
        return id(module), times - 1

    def _new_site(self, call: AttentionCall) -> Site:
        name = self._names.get(id(call.module), type(call.module).__name__)
        cross = cross_by_name(name)
        if cross is None:
            cross = call.cross
        if cross is None:
            cross = self._is_cross_attention(call)
        stack = stack_of(self._stacks, name, cross)
        layer = sum(site.stack == stack for site in self._known.values())
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        return Site(
            name,
            stack,
            layer,
            heads,
            kv_heads,
            cross,
            call.watched,
            kernel=call.kernel,
            statistics=call.statistics_kernel,
            first_head=first_head_of(call.module, heads),
        )

    def _is_cross_attention(self, call: AttentionCall) -> bool:
        """Whether the keys belong to another text, by the inputs of the modules around."""
        T, S = call.q.shape[2], call.k.shape[2]
        for around in (*filter(None, [call.module_call]), *self._running):
            is_cross = around.is_cross_attention(T, S)
            if is_cross is not None:
                return is_cross
        return S < T


def _share_memory(queries: Tensor | None, later: Tensor) -> bool:
    """Whether two tensors are parts of one."""
    if queries is None:
        return False
    return queries.untyped_storage().data_ptr() == later.untyped_storage().data_ptr()
