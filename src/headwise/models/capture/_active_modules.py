"""Which modules of a model are running while something is heard, and what they were given."""

import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise._count_names import HEADS
from headwise._interrupts import reversible
from headwise.errors import UnsupportedError
from headwise.models._hooks import Hooks
from headwise.models.capture._call import Answer


def heads_of(module: nn.Module) -> int:
    """How many heads a module says it has; 1 where it says nothing."""
    found = [getattr(module, name, None) for name in (*HEADS, "nhead", "heads")]
    return next((heads for heads in found if isinstance(heads, int) and heads > 0), 1)


@dataclass(eq=False)
class ModuleCall:
    """A module that is running, what it was given, and what of that it has handed on as it is.

    Attributes:
        texts: Its arguments that may be tokens: floats of three axes.
        quiet: Whether it tells of its attention by itself.
        queries: Those of its latest attention call.
        thread: Where it runs; 0 in compiled code, which cannot ask.
        used: Those among them that a module within it was given first.
        counted: The sites whose tokens were counted in this run.
    """

    module: nn.Module
    texts: list[Tensor]
    quiet: bool
    used: list[Tensor] = field(default_factory=list)
    queries: Tensor | None = None
    thread: int = 0
    counted: set[Hashable] = field(default_factory=set)

    def reads_another_text(self, T: int, S: int) -> bool | None:
        """Whether the `S` keys of its attention are tokens other than its `T` queries.

        They are when a projection in it was given another argument than the first one. Keys of
        their own tokens may still be more than queries are: those of a cache. None where its
        arguments tell nothing.
        """
        if len(self.texts) > 1 and self.texts[0] is self.texts[1]:
            return False
        if any(x.shape[1] == S and (S != T or self._was_used(x)) for x in self.texts[1:]):
            return True
        return False if self.used else None

    def _was_used(self, x: Tensor) -> bool:
        return x is not self.texts[0] and any(x is one for one in self.used)


def _texts(args: Iterable[Any]) -> list[Tensor]:
    return [x for x in args if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()]


class ActiveModules:
    """The modules of one model that are running, and whether their attention is heard elsewhere.

    Attributes:
        runs: Those that have begun and not ended, the innermost last.
        heard_elsewhere: How many of them tell of their attention by themselves.
        called: Every module that has been called so far, by identity.
        unread: The axes of a softmax in a module, by identity, whose values were not found.
        answer: Who may give the heads of a call instead of the model; None: nobody.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.runs: list[ModuleCall] = []
        self.heard_elsewhere = 0
        self.called: set[int] = set()
        self.unread: dict[int, int] = {}

    def innermost(self, *but: type[nn.Module]) -> nn.Module:
        """The module whose own code is running, or the one around those of some types."""
        modules = [run.module for run in self.runs]
        return next((m for m in reversed(modules) if not isinstance(m, but)), modules[-1])

    @property
    def outermost(self) -> ModuleCall | None:
        """The run within which all others happen: that of the whole model, or a part alone."""
        return self.runs[0] if self.runs else None

    def run_of(self, module: nn.Module) -> ModuleCall | None:
        """The run of a module that is going on."""
        return next((run for run in reversed(self.runs) if run.module is module), None)

    def may_answer(self, *inputs: Tensor) -> bool:
        """Whether somebody may: only where no gradient needs the way that the model went."""
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return self.answer is not None and not trained and not torch.compiler.is_compiling()

    def reads_another_text(self, T: int, S: int) -> bool:
        """Whether the keys of the attention call that is heard belong to another text."""
        for run in reversed(self.runs):
            told = run.reads_another_text(T, S)
            if told is not None:
                return told
        return S < T

    @reversible
    def follow(self, model: nn.Module, elsewhere: tuple[type[nn.Module], ...]) -> Iterator[None]:
        """Keep count while the model runs; modules of types `elsewhere` are heard by themselves."""
        with Hooks() as hooks:
            for module in model.modules():
                enter = partial(self._enter, isinstance(module, elsewhere))
                hooks.before(module, enter, with_kwargs=True)
                hooks.after(module, self._leave, always_call=True)
            yield

    def _enter(
        self, quiet: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        self._check_thread(thread)
        self._leave(module)  # an interruption may have left it open
        texts = _texts([*args, *kwargs.values()])
        if self.runs and texts and any(texts[0] is x for x in self.runs[-1].texts):
            self.runs[-1].used.append(texts[0])
        self.runs.append(ModuleCall(module, texts, quiet, thread=thread))
        self.called.add(id(module))
        self.heard_elsewhere += quiet

    def _check_thread(self, here: int) -> None:
        """Passes may come from any thread, but one after the other."""
        there = self.runs[0].thread if self.runs else here
        if here and there and here != there:
            if any(one.ident == there for one in threading.enumerate()):
                raise UnsupportedError(
                    f"observe: {type(self.runs[0].module).__name__} runs in two threads at once. "
                    f"Let one wait for the other, or watch a copy in each (copy.deepcopy)."
                )
            self._leave(self.runs[0].module)  # an interrupted thread left it open

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """End the run of a module, and what runs within it."""
        while self.run_of(module) is not None:
            left = self.runs.pop()
            self.heard_elsewhere -= left.quiet
            left.queries = None
