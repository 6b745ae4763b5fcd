"""What text a model is reading: its token ids, and which of them are padding."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    """One side of a model's input.

    Attributes:
        ids: The tokens of this forward pass.
        real: False for padding; longer than `ids` where earlier tokens are cached.
        positions: Of the tokens of this forward pass in their text, where the caller told.
    """

    ids: Int[Tensor, "B T"] | None = None
    real: Bool[Tensor, "B S"] | None = None
    positions: Int[Tensor, "B T"] | None = None


class Inputs:
    """The text of the forward pass that is running, for those who hear its attention calls.

    Attributes:
        main: What the model reads: the encoder's text in an encoder-decoder.
        decoder: What the decoder of an encoder-decoder reads.
        passes: How many forward passes have begun.
        inside: Whether one is running.
    """

    def __init__(self) -> None:
        self.main, self.decoder = Text(), Text()
        self.passes = 0
        self.inside = False

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator["Inputs"]:
        """Read the arguments of each forward pass of `model`."""
        signature = inspect.signature(model.forward)

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            self.main = _text(given)
            self.decoder = _text(given, "decoder_")
            self.passes += 1
            self.inside = True

        def end(*_: Any) -> None:
            self.inside = False
            self.main, self.decoder = Text(), Text()

        before = model.register_forward_pre_hook(begin, with_kwargs=True)
        after = model.register_forward_hook(end, always_call=True)
        try:
            yield self
        finally:
            before.remove()
            after.remove()


def _text(given: Mapping[str, Any], side: str = "") -> Text:
    # A mask of four axes says who sees whom, not what is padding.
    mask = _two_axes(given.get(f"{side}attention_mask"))
    return Text(
        ids=_two_axes(given.get(f"{side}input_ids")),
        real=None if mask is None else mask.bool(),
        positions=_two_axes(given.get(f"{side}position_ids")),
    )


def _two_axes(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.ndim == 2 else None
