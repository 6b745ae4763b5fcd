"""What text a model is reading: its token ids, and which of them are padding."""

import inspect
from collections.abc import Iterator
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
    """

    ids: Int[Tensor, "B T"] | None = None
    real: Bool[Tensor, "B S"] | None = None


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
            self.main = _text(given.get("input_ids"), given.get("attention_mask"))
            self.decoder = _text(
                given.get("decoder_input_ids"), given.get("decoder_attention_mask")
            )
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


def _text(ids: Any, mask: Any) -> Text:
    known = ids if isinstance(ids, Tensor) and ids.ndim == 2 else None
    # A mask of four axes says who sees whom, not what is padding.
    real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    return Text(known, real)
