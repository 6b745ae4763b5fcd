"""The fingerprint of a model: hashed once, and again after any change of its weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headwise.models import _fingerprint, fingerprint


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models whose weights were hashed."""
    models: list[nn.Module] = []
    inner = _fingerprint.hash_weights

    def count(model: nn.Module) -> str:
        models.append(model)
        return inner(model)

    monkeypatch.setattr(_fingerprint, "hash_weights", count)
    return models


def test_unchanged_weights_are_hashed_once(hashed: list[nn.Module]) -> None:
    model = _model()
    assert len({fingerprint(model) for _ in range(3)}) == 1
    assert len(hashed) == 1
    assert fingerprint(copy.deepcopy(model)) == fingerprint(model)


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[17, 23] += 1


def _through_data(model: nn.Module) -> None:
    model[0].weight.data.mul_(2)


def _through_numpy(model: nn.Module) -> None:
    model[2].bias.detach().numpy()[1] = 7


def _exchanged(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach() + 1)


def _exchanged_data(model: nn.Module) -> None:
    model[2].weight.data = model[2].weight.detach() + 1


def _renamed(model: nn.Module) -> None:
    model.add_module("3", nn.Linear(3, 3))


def _by_a_buffer(model: nn.Module) -> None:
    model(torch.randn(5, 40))


def _by_an_optimizer(model: nn.Module) -> None:
    model[2](torch.randn(5, 40)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES = (
    _in_place, _through_data, _through_numpy, _exchanged, _exchanged_data, _renamed, _by_a_buffer,
    _by_an_optimizer, nn.Module.double,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[nn.Module], object]) -> None:
    model = _model()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before
    fresh = copy.deepcopy(model)
    assert fingerprint(model) == fingerprint(fresh)


def test_weights_without_versions_are_hashed_each_time(hashed: list[nn.Module]) -> None:
    with torch.inference_mode():
        model = _model()
        before = fingerprint(model)
        model[0].weight[17, 23] += 1
        assert fingerprint(model) != before
    assert len(hashed) == 2
