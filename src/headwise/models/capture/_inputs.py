"""What text a model is reading: its token ids, and which of them are padding."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.models._hooks import Hooks


@dataclass(frozen=True)
class Text:
    """One side of a model's input.

    Attributes:
        ids: The tokens of this forward pass.
        real: False for padding; longer than `ids` where earlier tokens are cached.
        positions: Of the tokens of this forward pass in their text, where the caller told.
        cached: How many columns of the text were read before, where a cache tells.
        tokens: How many columns this forward pass reads, as ids or as embeddings.
    """

    ids: Int[Tensor, "B T"] | None = None
    real: Bool[Tensor, "B S"] | None = None
    positions: Int[Tensor, "B T"] | None = None
    cached: int | Int[Tensor, ""] | None = None
    tokens: int | None = None

    def filled(self, more: "Text") -> "Text":
        """The same, and `more` for what is not known, unless it is a text of another length."""
        if None not in (self.tokens, more.tokens) and self.tokens != more.tokens:
            return self
        return Text(
            self.ids if self.ids is not None else more.ids,
            self.real if self.real is not None else more.real,
            self.positions if self.positions is not None else more.positions,
            self.cached if self.cached is not None else more.cached,
            self.tokens if self.tokens is not None else more.tokens,
        )


@dataclass(frozen=True)
class StackInputs:
    """What one stack reads: its own text, and the one that it attends to across."""

    own: Text = Text()
    other: Text = Text()

    def filled(self, more: "StackInputs") -> "StackInputs":
        """The same, and `more` for what is not known."""
        return StackInputs(self.own.filled(more.own), self.other.filled(more.other))


# What a model is given instead of tokens; a mask beside it is not about what it attends to.
_NO_TOKENS = ("pixel_values", "input_values", "input_features")
_NOTHING = StackInputs()


class InputTracker:
    """The texts of the forward pass that is running, for those who hear its attention calls.

    Attributes:
        passes: How many forward passes have begun: of the model, or of a stack by itself.
        inside: Whether one is running.
    """

    def __init__(self, model: nn.Module, stacks: Mapping[str, nn.Module]) -> None:
        self._modules = {"": model, **(stacks or _models_within(model))}
        self._readings: dict[str, StackInputs] = {}
        self._main, self._decoder = Text(), Text()
        self._open: list[str] = []
        self.passes = 0

    @property
    def inside(self) -> bool:
        return bool(self._open)

    def of(self, stack: str) -> StackInputs:
        """What a stack is reading; what it was not told itself, the model may have been."""
        if stack in ("", "cross"):
            # The innermost model knows best: a wrapper may have put a prefix before its text.
            readings = [self._readings.get(name, _NOTHING) for name in reversed(self._open)]
            return reduce(StackInputs.filled, readings, _NOTHING)
        mine = self._readings.get(_without_cross(stack), _NOTHING)
        if stack.startswith("decoder"):
            return mine.filled(StackInputs(self._decoder, self._main))
        whole, told = self._main.real, mine.own.real
        same = whole is not None and told is not None and torch.equal(whole, told)
        return mine.filled(StackInputs(self._main)) if stack == "encoder" or same else mine

    def learn(self, stack: str, real: Bool[Tensor, "B S"]) -> None:
        """What a call told of the padding of its stack is true of the rest of the pass."""
        mine = self._readings.get(_without_cross(stack), _NOTHING)
        self._readings[_without_cross(stack)] = mine.filled(StackInputs(Text(real=real)))

    @reversible
    def follow(self) -> Iterator["InputTracker"]:
        """Read the arguments of each forward pass."""
        with Hooks() as hooks:
            for name, module in self._modules.items():
                begin = partial(self._begin, name, inspect.signature(module.forward))
                hooks.before(module, begin, with_kwargs=True)
                hooks.after(module, partial(self._end, name), always_call=True)
            yield self

    def _begin(
        self,
        name: str,
        signature: inspect.Signature,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self._readings[name] = StackInputs(_text(given), _text(given, "encoder_"))
        if name == "":
            self._main, self._decoder = _text(given), _text(given, "decoder_")
        self._close(name)
        self.passes += not self._open
        self._open.append(name)

    def _end(self, name: str, *_: Any) -> None:
        self._readings.pop(name, None)
        self._close(name)
        if name == "":
            self._main, self._decoder = Text(), Text()

    def _close(self, name: str) -> None:
        """End a pass, and what began within it: an interruption may have left any open."""
        if name in self._open:
            del self._open[self._open.index(name) :]


def _models_within(model: nn.Module) -> dict[str, nn.Module]:
    """The models that a model wraps, by name: modules that take a whole text and its mask."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and _reads_text(inspect.signature(module.forward).parameters)
    }


def _reads_text(parameters: Collection[str]) -> bool:
    return "attention_mask" in parameters and not {"input_ids", "inputs_embeds"}.isdisjoint(
        parameters
    )


def _without_cross(stack: str) -> str:
    return stack.removesuffix("cross").removesuffix(".")


def _text(given: Mapping[str, Any], side: str = "") -> Text:
    if any(given.get(name) is not None for name in _NO_TOKENS) and "input_ids" not in given:
        return Text()
    # A mask of four axes says who sees whom, not what is padding.
    mask = _two_axes(given.get(f"{side}attention_mask"))
    ids = _two_axes(given.get(f"{side}input_ids"))
    vectors = given.get("encoder_hidden_states" if side == "encoder_" else f"{side}inputs_embeds")
    read = ids if ids is not None else vectors
    return Text(
        ids=ids,
        real=None if mask is None else mask.bool(),
        positions=_two_axes(given.get(f"{side}position_ids")),
        cached=None if side == "encoder_" else _length(given.get("past_key_values")),
        tokens=read.shape[1] if isinstance(read, Tensor) and read.ndim in (2, 3) else None,
    )


def _length(cache: Any) -> int | Tensor | None:
    """How many tokens a cache has seen; of one that counts in place, as it counts now."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
    return length.clone() if isinstance(length, Tensor) else length


def _two_axes(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.ndim == 2 else None
