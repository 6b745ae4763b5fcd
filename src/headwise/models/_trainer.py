"""A callback of Hugging Face's Trainer, made of functions."""

from collections.abc import Callable
from typing import Any


def trainer_callback(
    begin: Callable[[int], object], step: Callable[[], object], end: Callable[[], object]
) -> Any:
    """A `transformers.TrainerCallback` that calls these.

    Args:
        begin: When training begins, with the optimizer steps taken before.
        step: After each optimizer step.
        end: When training ends.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc] # its types are not known
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            end()

    return Callback()
