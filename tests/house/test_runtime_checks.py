"""Tests run with checks of types and shapes."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from headwise.files import is_unicode
from headwise.kernels import attend


def test_the_package_is_checked() -> None:
    q = torch.zeros(2, 2, 4, 8)
    with pytest.raises(BeartypeCallHintViolation, match="text"):
        is_unicode(8)  # type: ignore[arg-type]
    for k in (q[0], q[..., 1:]):  # another number of axes, and an axis of another size
        with pytest.raises(BeartypeCallHintViolation, match=r"headwise\.kernels"):
            attend(q, k, q)
