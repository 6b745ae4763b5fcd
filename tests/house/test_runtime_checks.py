"""Tests run with checks of types and shapes, which `runtime_checks` makes lean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError, config
from torch import Tensor

import runtime_checks
from headwise.files import is_unicode
from headwise.kernels import attend


def test_the_package_is_checked() -> None:
    q = torch.zeros(2, 2, 4, 8)
    with pytest.raises(TypeCheckError, match=r"parameters of headwise\.kernels"):
        attend(q, q[0], q)
    with pytest.raises(BeartypeCallHintViolation, match="text"):
        is_unicode(8)  # type: ignore[arg-type]


def _of_axes(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    return (a * b).sum(0 if len(a) == 7 else 1)


def _of_maybe_axes(a: Float[Tensor, "n d"] | None, b: dict[str, Float[Tensor, " n"]]) -> None:
    del a, b


def _of_names(a: int, b: list[str]) -> str:
    return "" if a else str(b) if len(b) == 1 else 0  # type: ignore[return-value]


@dataclass(frozen=True)
class _Axes:
    a: Float[Tensor, "n d"]
    b: Float[Tensor, " n"]


@dataclass(frozen=True)
class _Names:
    a: int


@pytest.mark.parametrize(
    ("item", "right", "wrong"),
    [
        (_of_axes, (torch.ones(3, 2), torch.ones(3, 2)), (torch.ones(3, 2), torch.ones(3, 1))),
        (_of_axes, (torch.ones(6, 2), torch.ones(6, 2)), (torch.ones(7, 2), torch.ones(7, 2))),
        (_of_maybe_axes, (None, {"b": torch.ones(2)}), (torch.ones(3, 1), {"b": torch.ones(2)})),
        (_of_names, (1, ["a"]), ("1", ["a"])),
        (_of_names, (0, ["a"]), (0, [])),
        (_Axes, (torch.ones(3, 2), torch.ones(3)), (torch.ones(3, 2), torch.ones(2))),
        (_Names, (1,), ("1",)),
    ],
)
def test_right_calls_pass_and_wrong_ones_are_found(
    item: Callable[..., Any],
    right: tuple[Any, ...],
    wrong: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = runtime_checks.lean_check(typechecker=beartype)(item)
    checked(*right)
    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        checked(*wrong)
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    checked(*wrong)
