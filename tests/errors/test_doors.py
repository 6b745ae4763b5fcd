"""Every public function that takes a model refuses anything else, such as its name."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from torch import nn

import headwise as hw
from headwise.errors import ArgumentError

DOORS: dict[str, Callable[[Any], Any]] = {
    "HeadMonitor": hw.HeadMonitor,
    "ablate": lambda model: ExitStack().enter_context(hw.ablate(model, (0, 1))),
    "costs": hw.costs,
    "find_roles": lambda model: hw.find_roles(model, None, ["a"]),
    "group_heads": lambda model: hw.group_heads(model, 2),
    "importance": lambda model: hw.importance(model, ["a"]),
    "observe": lambda model: ExitStack().enter_context(hw.observe(model)),
    "prune": lambda model: hw.prune(model, (0, 1)),
    "prune_curves": lambda model: hw.prune_curves(model, ["a"], {"mine": [(0, 1)]}),
    "recover": lambda model: hw.recover(nn.Linear(2, 2), model, ["a"]),
    "study": lambda model: hw.study(model, None, ["a"]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["bert-base", None])
def test_arguments_that_are_no_model_are_refused(door: str, model: Any) -> None:
    message = rf"{door}: the model is {model!r}\. Give a module; headwise\.load opens"
    with pytest.raises(ArgumentError, match=message):
        DOORS[door](model)


def test_an_argument_that_is_no_model_is_named_in_short() -> None:
    with pytest.raises(ArgumentError, match=r"the model is \[0, 1, 2, .*\.\.\.\]") as refused:
        hw.costs(list(range(1000)))  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200
