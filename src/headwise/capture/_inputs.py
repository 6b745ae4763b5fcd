"""The text that a model reads: its token ids, and which of them are padding."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import FunctionType
from typing import Any, no_type_check
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import Hooks, cache_in


@dataclass(frozen=True)
class Text:
    """The tokens that a model or one of its stacks reads in a forward pass.

    Attributes:
        ids: The token ids of this forward pass.
        real: False for padding; longer than `ids` if earlier tokens are cached.
        positions: The position of each token in its text, if the caller passed `position_ids`.
        cached: The number of columns in the cache before this pass, if the cache says.
        tokens: The number of columns this forward pass reads, as ids or as embeddings.
    """

    ids: Int[Tensor, "B T"] | None = None
    real: Bool[Tensor, "B S"] | None = None
    positions: Int[Tensor, "B T"] | None = None
    cached: int | Int[Tensor, ""] | None = None
    tokens: int | None = None

    def filled(self, default: "Text") -> "Text":
        """The same text with `default` for unknown fields, unless their lengths differ."""
        if None not in (self.tokens, default.tokens) and self.tokens != default.tokens:
            return self
        return Text(
            self.ids if self.ids is not None else default.ids,
            self.real if self.real is not None else default.real,
            self.positions if self.positions is not None else default.positions,
            self.cached if self.cached is not None else default.cached,
            self.tokens if self.tokens is not None else default.tokens,
        )

    def written(self) -> "Text":
        """The same text without columns of its mask that a static cache has not written yet."""
        if self.real is None or self.cached is None or self.tokens is None:
            return self
        total = int(self.cached) + self.tokens
        if total >= self.real.shape[1] or bool(self.real[:, total:].any()):
            return self
        return replace(self, real=self.real[:, :total])


@dataclass(frozen=True)
class StackInputs:
    """The text that one stack reads, and the text that it attends to in cross-attention.

    The arguments of a whole model may also say what its decoder reads.
    """

    text: Text = Text()
    cross_text: Text = Text()
    decoder_text: Text = Text()

    def filled(self, default: "StackInputs") -> "StackInputs":
        """The same inputs with `default` for unknown fields."""
        return StackInputs(
            self.text.filled(default.text), self.cross_text.filled(default.cross_text)
        )


# Inputs that are not tokens; a mask beside them does not describe what the model attends to.
_NO_TOKENS = ("pixel_values", "input_values", "input_features")
_UNKNOWN = StackInputs()


@dataclass(frozen=True, eq=False)
class PassInputs:
    """What a forward pass is given besides its texts.

    Attributes:
        number: Its number, from 1: of the passes of the model, or of a stack by itself.
        cache: The cache of keys and values, or None.
        kept: The logits that it returns: the number of the last ones, or the indices of some; None
            is all.
        outer_error: The exception that was being handled when it began.
    """

    number: int = 0
    cache: Any = None
    kept: int | Tensor | None = None
    outer_error: BaseException | None = None


class InputTracker:
    """The texts of the current forward pass of a model, whose stacks are those of `find_stacks`.

    Attributes:
        latest: The forward pass that runs, or has run last.
        inside: Whether a forward pass is running.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Mapping[str, str],
        on_begin: Callable[[bool], None] = lambda _: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_begin: Called when a forward pass begins, with whether it is one of training.
            on_failure: Called when a forward pass ends in an exception.
        """
        inner = {name: model.get_submodule(path) for name, path in stacks.items()}
        self._modules = {"": model, **(inner or _inner_models(model))}
        self._may_make_masks = len(self._modules) > 1 and not _takes_mask(model.forward)
        self._inputs: dict[str, StackInputs] = {}
        self._open: list[str] = []
        self._known: dict[str, StackInputs] = {}  # what `of` gave since the inputs changed
        self.latest = PassInputs()
        self._on_begin, self._on_failure = on_begin, on_failure

    @property
    def inside(self) -> bool:
        return bool(self._open)

    def of(self, stack: str) -> StackInputs:
        """The inputs of a stack; what it did not receive itself is taken from the model.

        Calls of the same pass get the same object.
        """
        if stack not in self._known:
            self._known[stack] = self._inputs_of(stack)
        return self._known[stack]

    def _inputs_of(self, stack: str) -> StackInputs:
        if stack in ("", "cross"):
            # The innermost model comes first: a wrapper may have put a prefix before its text.
            inputs = [self._inputs.get(name, _UNKNOWN) for name in reversed(self._open)]
            return reduce(StackInputs.filled, inputs, _UNKNOWN)
        stack_inputs = self._inputs.get(_without_cross(stack), _UNKNOWN)
        model = self._inputs.get("", _UNKNOWN)
        if stack.startswith("decoder"):
            return stack_inputs.filled(StackInputs(model.decoder_text, model.text))
        model_real, stack_real = model.text.real, stack_inputs.text.real
        same_mask = (
            model_real is not None
            and stack_real is not None
            and torch.equal(model_real, stack_real)
        )
        if stack == "encoder" or same_mask:
            return stack_inputs.filled(StackInputs(model.text))
        return stack_inputs

    def learn(self, stack: str, real: Bool[Tensor, "B S"]) -> None:
        """Use the padding that a call of a stack reports for the rest of the pass."""
        name = _without_cross(stack)
        stack_inputs = self._inputs.get(name, _UNKNOWN)
        self._inputs[name] = stack_inputs.filled(StackInputs(Text(real=real)))
        self._known.clear()

    @contextmanager
    def follow(
        self, *, compiled: bool = False, on_success: Callable[[], None] | None = None
    ) -> Iterator["InputTracker"]:
        """Read the arguments of each forward pass.

        Args:
            compiled: Whether compiled code may run, which is not followed.
            on_success: Called when a forward pass of the whole model has ended without an
                exception.
        """
        with Hooks(compiled=compiled) as hooks:
            for name, module in self._modules.items():
                begin = partial(self._begin, name, positional_parameters(module.forward))
                hooks.before(module, begin, with_kwargs=True)
                hooks.after(module, partial(self._end, name, on_success), always_call=True)
            yield self

    def begin_in_graph(self, text: Text) -> None:
        """A forward pass begins in a compiled graph, which does not tell when it ends."""
        self._close("")
        self._inputs[""] = StackInputs(text)
        self._open[:] = [""]
        self.latest = PassInputs(self.latest.number + 1)

    def follows_model(self, stack: str) -> bool:
        """Whether the inputs of a stack are, in each pass, those that the model itself is given."""
        if self._may_make_masks:
            return False
        model = self._inputs.get("", _UNKNOWN)
        return stack == "" and self._open[:1] == [""] and _same(self.of(stack).text, model.text)

    def _begin(
        self,
        name: str,
        positional: Sequence[str],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if torch.compiler.is_exporting():
            raise UnsupportedError(
                f"export: {type(module).__name__} cannot be exported while its heads are watched "
                f"or edited. Export it outside the block."
            )
        # A call that does not fit the signature is refused by the model itself.
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        text = _text(arguments)
        decoder_text = _text(arguments, "decoder_") if name == "" else Text()
        self._inputs[name] = StackInputs(text, _text(arguments, "encoder_"), decoder_text)
        self._close(name)
        if not self._open:
            number, kept = self.latest.number + 1, arguments.get("logits_to_keep")
            self.latest = PassInputs(number, cache_in(arguments), kept, sys.exception())
            self._on_begin(module.training and torch.is_grad_enabled())
        self._open.append(name)

    def _end(self, name: str, on_success: Callable[[], None] | None, *_: Any) -> None:
        self._inputs.pop(name, None)
        self._close(name)
        # The model may run where an exception is being handled.
        if not self._open and sys.exception() is not self.latest.outer_error:
            self._on_failure()
        elif name == "" and on_success is not None:
            on_success()

    def _close(self, name: str) -> None:
        """End a pass and all passes inside it: an interrupt may have left any of them open."""
        self._known.clear()
        if name in self._open:
            del self._open[self._open.index(name) :]


def _same(text: Text, other: Text) -> bool:
    def equal(x: Any, y: Any) -> bool:
        are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        return torch.equal(x, y) if are_tensors else x is y or bool(x == y)

    return all(map(equal, vars(text).values(), vars(other).values()))


def _inner_models(model: nn.Module) -> dict[str, nn.Module]:
    """The models that a model wraps, by name: modules that take a whole text and its mask."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and _reads_text(_parameters(module.forward))
    }


# The parameters of functions, which take long to inspect.
_known: WeakKeyDictionary[FunctionType, Collection[str]] = WeakKeyDictionary()


def _parameters(forward: Callable[..., Any]) -> Collection[str]:
    """The names of the parameters of a method; modules of one class share it."""
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):
        return tuple(inspect.signature(forward).parameters)
    if function not in _known:
        _known[function] = tuple(inspect.signature(forward).parameters)
    return _known[function]


def positional_parameters(forward: Callable[..., Any]) -> list[str]:
    """The parameters that may be given by their places, in this order."""
    parameters = inspect.signature(forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _takes_mask(forward: Callable[..., Any]) -> bool:
    """Whether a model can be given the mask of its text."""
    parameters = inspect.signature(forward).parameters.values()
    return any(x.name == "attention_mask" or x.kind is x.VAR_KEYWORD for x in parameters)


def _reads_text(parameters: Collection[str]) -> bool:
    return "attention_mask" in parameters and not {"input_ids", "inputs_embeds"}.isdisjoint(
        parameters
    )


def _without_cross(stack: str) -> str:
    return stack.removesuffix("cross").removesuffix(".")


@no_type_check  # which a compiler cannot trace
def has_no_tokens(arguments):
    """Whether a model is given what is not tokens, such as pixels."""
    for name in _NO_TOKENS:
        if arguments.get(name) is not None:
            return "input_ids" not in arguments
    return False


def _text(arguments: Mapping[str, Any], prefix: str = "") -> Text:
    if has_no_tokens(arguments):
        return Text()
    # A mask of four axes says which queries see which keys, not what is padding.
    mask = two_axes(arguments.get(f"{prefix}attention_mask"))
    ids = two_axes(arguments.get(f"{prefix}input_ids"))
    is_encoder = prefix == "encoder_"
    vectors = arguments.get("encoder_hidden_states" if is_encoder else f"{prefix}inputs_embeds")
    tokens = ids if ids is not None else vectors
    cached = None if is_encoder else cached_length(arguments)
    return Text(
        ids=ids,
        real=None if mask is None else mask.to(torch.bool, copy=True),  # it may change later
        positions=two_axes(arguments.get(f"{prefix}position_ids")),
        cached=cached.clone() if isinstance(cached, Tensor) else cached,  # it may count in place
        tokens=tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim in (2, 3) else None,
    )


@no_type_check  # which a compiler cannot trace
def cached_length(arguments):
    """The number of tokens in the cache, if it says."""
    cache = cache_in(arguments)
    return cache.get_seq_length() if hasattr(cache, "get_seq_length") else None


@no_type_check  # which a compiler cannot trace
def two_axes(value):
    """What says which token stands where, and no mask of queries and keys, or several."""
    return value if isinstance(value, Tensor) and value.ndim == 2 else None
