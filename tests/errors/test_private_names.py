"""Private names of torch and transformers: where one is missing, a slower way or a clear error."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import headwise as hw
from headwise._torch_private import _interception
from headwise.attention.huggingface import _transformers
from headwise.errors import UnsupportedError
from headwise.kernels import _attend
from house.source import PACKAGE

OWNERS = {
    r"torch\._C\.(\w+)|functions\.(\w+)|required\(torch\._C, \"(\w+)\"": torch._C,
    r"_functorch\.(\w+)|transforms\.(\w+)|_functorch, \"(\w+)\"": torch._C._functorch,
    r"required\(torch\.overrides, \"(\w+)\"": torch.overrides,
}
# Torch itself takes every step by these.
OF_TORCH = {"_functorch", "DispatchKeySet"}


def _names() -> Iterator[Any]:
    """Each private name that is looked up where it is used."""
    folder = PACKAGE / "_torch_private"
    source = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
    for pattern, owner in OWNERS.items():
        found = {name for match in re.finditer(pattern, source) for name in match.groups() if name}
        found = {name for name in found if hasattr(owner, name)} - OF_TORCH
        yield from (pytest.param(owner, name, id=name) for name in sorted(found))


NAMES = [*_names()]


def test_names_are_found() -> None:
    names = {param.id for param in NAMES}
    assert {"_is_tracing", "peek_interpreter_stack", "_push_mode"} <= names
    assert len(NAMES) > 15


def _attended() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 20, 8) for heads in (4, 2, 2))
    found = []
    for how in ({}, {"causal": True}, {"need_lse": True, "window": 3}, {"need_weights": True}):
        for _ in range(2):
            result = hw.attend(q, k, v, **how)
            found += [result] if isinstance(result, torch.Tensor) else [result.heads]
    learned = q.clone().requires_grad_()
    return [*found, *torch.autograd.grad(hw.attend(learned, k, v).sum(), learned)]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_attend_is_right_without_any_private_name(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _known(_attended)
    monkeypatch.setattr(_attend, "_PREPARED", {})
    monkeypatch.delattr(owner, name)
    for mine, theirs in zip(_attended(), known, strict=True):
        torch.testing.assert_close(mine, theirs)


@cache
def _known(compute: Callable[[], Any]) -> Any:
    """What is computed with all names."""
    return compute()


class Attention(nn.Module):
    """Attention of torch alone, and softmax by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 6, 2, 4).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(q, q, q)
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        return (weights @ heads).transpose(1, 2).reshape(1, 6, 8)


def _watched() -> torch.Tensor:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()), torch.randn(1, 6, 8)
    with torch.no_grad(), hw.observe(model) as watch:
        model(x)
        model(x)
    return torch.from_numpy(watch.table().mean("entropy"))


def _forget() -> None:
    """What was found out about torch is asked again."""
    for value in vars(_interception).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.mark.filterwarnings("ignore:module forward hook")  # a second refusal, after a pass
@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_watch_is_right_or_refused_without_any_private_name(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    known = _known(_watched)
    request.addfinalizer(_forget)
    _forget()
    monkeypatch.delattr(owner, name)
    with suppress(UnsupportedError):
        torch.testing.assert_close(_watched(), known)
        return
    with pytest.raises(UnsupportedError, match=f"has no {name}, which this call needs"):
        _watched()


OF_TRANSFORMERS = {
    "sdpa_attention_forward": "integrations.sdpa_attention", "sdpa_mask": "masking_utils",
    "eager_mask": "masking_utils", "causal_mask_function": "masking_utils",
    "bidirectional_mask_function": "masking_utils", "_active_collector": "utils.output_capturing",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_missing_name_of_transformers_is_refused_when_it_is_needed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"transformers.{OF_TRANSFORMERS[name]}")
    with monkeypatch.context() as patch:
        patch.delattr(module, name)
        importlib.reload(_transformers)  # what is watched imports it, also without transformers
    assert not _transformers.collects_weights()
    missing = [x for x in vars(_transformers).values() if _transformers._is_refused(x)]
    with pytest.raises(UnsupportedError, match=f"has no {name}, which .*'eager'"):
        missing[0]()
    importlib.reload(_transformers)


def test_models_of_another_transformers_are_refused_and_others_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.make("Llama")
    monkeypatch.setitem(sys.modules, "headwise.capture._interface", None)
    torch.testing.assert_close(_watched(), _known(_watched))
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM is of a version of transformers"):
        hw.observe(model).__enter__()
