"""A fingerprint tells models apart by the values of their weights, however these are kept.

It is hashed once, and again after any change of the weights.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
import zoo
from torch import nn

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.models import _fingerprint, fingerprint
from oracles import padded

pytestmark = pytest.mark.filterwarnings("ignore:.*quantiz.* deprecated")
BATCH = {"input_ids": padded([[5, 9, 7, 3]], "right")["input_ids"]}
OFFLOAD: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "memory": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "disk": lambda model, folder: accelerate.disk_offload(model, str(folder), "cpu"),
    "buffers too": lambda model, folder: accelerate.cpu_offload(model, "cpu", offload_buffers=True),
}


def _packed(dtype: torch.dtype, scale: float = 1.0) -> nn.Module:
    model = zoo.make("Bert")
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.mul_(scale)
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


@pytest.mark.full
def test_packed_weights_have_a_name_of_their_own() -> None:
    models = [_packed(torch.qint8), _packed(torch.float16), zoo.make("Bert")]
    models += [_packed(torch.qint8, 1.5), _packed(torch.float16, 1.5)]
    marks = [fingerprint(model) for model in models]
    assert len(set(marks)) == len(marks)
    assert fingerprint(_packed(torch.qint8)) == marks[0]
    with torch.no_grad(), hw.observe(models[0]) as watch:
        models[0](**BATCH)
    assert watch.table().model == marks[0]


def holding(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("weight", weight)
    return module


class Scaled(torch.Tensor):
    """Integers and their scales, as torchao's quantised weights are."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor, settings: object) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, settings: object) -> None:
        self.integers, self.scale, self.settings = integers, scale, settings

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["integers", "scale"], self.settings

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of packed weights")


class Opaque(Scaled):
    """The same without a way to its parts."""

    __tensor_flatten__ = None


class Packing:
    pass


def test_weights_that_wrap_others_are_named_by_them() -> None:
    integers, scale = torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2)
    weights = [
        Scaled(integers, scale, ("row", Packing)),
        Scaled(integers + 1, scale, ("row", Packing)),
        Scaled(integers, 2 * scale, ("row", Packing)),
        Scaled(integers, scale, ("column", Packing)),
    ]
    marks = [fingerprint(holding(weight)) for weight in weights]
    assert len(set(marks)) == 4
    packings = [Packing(), Packing()]  # two objects of one kind
    same = {fingerprint(holding(Scaled(integers, scale, packing))) for packing in packings}
    assert len(same) == 1
    model = holding(weights[0])
    first = fingerprint(model)
    weights[0].integers.data.add_(1)  # found, although torch does not count it
    assert fingerprint(model) == marks[1] != first


def test_weights_that_cannot_be_read_are_refused_by_name() -> None:
    weight = Opaque(torch.ones(2, 3), torch.ones(2), None)
    with pytest.raises(UnsupportedError, match="fingerprint: weight is an Opaque, whose values"):
        fingerprint(holding(weight))


def test_quantised_tensors_differ_by_their_steps() -> None:
    x = torch.arange(6.0).view(2, 3)
    per_row = torch.tensor([0.5, 1.0]), torch.zeros(2), 0
    quantised = [
        torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
        torch.quantize_per_tensor(2 * x, 2.0, 0, torch.qint8),  # the same integers
        torch.quantize_per_channel(x, *per_row, torch.qint8),
    ]
    marks = {fingerprint(holding(weight)) for weight in quantised}
    assert len(marks) == 3
    assert fingerprint(holding(quantised[0].clone())) in marks


@pytest.mark.parametrize("place", OFFLOAD)
def test_weights_elsewhere_are_the_same_weights(place: str, tmp_path: Path) -> None:
    model = zoo.make("Bert")
    mark = fingerprint(model)
    model = OFFLOAD[place](model, tmp_path)
    assert next(model.parameters()).is_meta
    assert fingerprint(model) == mark
    with torch.no_grad(), hw.observe(model) as watch:
        model(**BATCH)
    assert watch.table().model == mark


def test_weights_without_values_have_no_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(UnsupportedError, match=r"fingerprint: bias has no values: it is on the m"):
        fingerprint(model)


def test_what_is_no_tensor_has_no_name() -> None:
    class Packed(nn.Module):
        def get_extra_state(self) -> object:
            return {"weights": b"..."}

    with pytest.raises(UnsupportedError, match=r"fingerprint: _extra_state is a dict, whose val"):
        fingerprint(Packed())


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
