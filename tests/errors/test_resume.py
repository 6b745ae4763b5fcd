"""A broken checkpoint of a training run is refused by name before the optimizer sees it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.errors import InputError
from headwise.lab import TrainSettings, train
from headwise.lab._run import TrainingRun

SMALL = TrainSettings(steps=3, batch_size=2, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)
# The embedding of tokens is the first weight, and a matrix.
FIRST, SECOND, STEP = (f"optimizer.0.{name}" for name in ("exp_avg", "exp_avg_sq", "step"))
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run after its second step."""
    path = tmp_path_factory.mktemp("run") / "training.safetensors"
    run = TrainingRun(SMALL)
    run.advance()
    run.advance()
    run.checkpoint(path)
    return path


def _about(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def _changed(whole: Path, folder: Path, change: Change, **about: str) -> Path:
    tensors = load_file(whole)
    change(tensors)
    path = folder / "training.safetensors"
    save_file(tensors, path, _about(whole) | about)
    return path


def _state(run: TrainingRun) -> list[Any]:
    moments = run.optimizer.state_dict()["state"]
    return [run.step, run.seconds, len(moments), *[x.clone() for x in run.model.parameters()]]


def _same(before: list[Any], after: list[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(before, after, strict=True)
    )


def _set(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


BROKEN: list[tuple[Change, str]] = [
    (_set(FIRST, lambda x: x[:1]), r"exp_avg \(exp_avg of tokens\.weight\) .* is \(1, 6\) float32"),
    (_set(SECOND, lambda x: x.flatten()), r"exp_avg_sq of tokens\.weight\) .* not \(\d+, 6\)"),
    (_set(FIRST, lambda x: x.double()), r"exp_avg of tokens\.weight\) .* float64, not .* float32"),
    (_set(SECOND, lambda x: x.to(torch.int64)), r"exp_avg_sq of .* int64, not .* float32"),
    (_set(STEP, lambda x: x.expand(3)), r"step of tokens\.weight\) .* is \(3,\) float32, not \(\)"),
    (_set(STEP, lambda x: x.double()), r"step of tokens\.weight\) .* float64, not \(\) float32"),
    (_set(STEP, lambda x: x + 5), r"step of tokens\.weight .* is 7, but the run is at step 2"),
    (_set(FIRST, lambda x: x * torch.nan), r"exp_avg of tokens\.weight\) .* is not finite"),
    (_set(SECOND, lambda x: x + torch.inf), r"exp_avg_sq of tokens\.weight\) .* is not finite"),
    (
        _set(SECOND, lambda x: x - 2),
        r"exp_avg_sq of tokens\.weight .* holds -2.*squares are not",
    ),
    (_set("model.norm.weight", lambda x: x * torch.nan), r"model\.norm\.weight .* is not finite"),
    (_set("model.norm.weight", lambda x: x.half()), r"model\.norm\.weight .* float16, not"),
    (lambda tensors: tensors.pop(SECOND), r"lacks optimizer\.0\.exp_avg_sq"),
    (lambda tensors: tensors.pop("model.norm.weight"), r"norm\.weight in .* is missing"),
    (lambda tensors: tensors.update({"optimizer.x.step": torch.zeros(())}), r"holds optimizer\.x"),
    (lambda tensors: tensors.update({"optimizer.99.step": torch.zeros(())}), r"optimizer\.99\.st"),
    (lambda tensors: tensors.update({"spare": torch.zeros(2)}), "holds spare, which the run does"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(
    change: Change, says: str, whole: Path, tmp_path: Path
) -> None:
    path = _changed(whole, tmp_path, change)
    run = TrainingRun(SMALL)
    before = _state(run)
    with pytest.raises(InputError, match=says):
        run.resume(path)
    assert _same(before, _state(run))


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"step": "0"}, "is of step 0, not 1 to 3"),
        ({"step": "4"}, "is of step 4, not 1 to 3"),
        ({"step": "-1"}, "is of step -1"),
        ({"step": "two"}, r"cannot be read \(.*'two'"),
        ({"seconds": "nan"}, "has seconds=nan"),
        ({"seconds": "-1"}, "has seconds=-1"),
        ({"settings": "{"}, "cannot be read"),
        ({"settings": "[3]"}, r"has settings \[3\]"),
    ],
)
def test_broken_facts_are_refused(
    about: dict[str, str], says: str, whole: Path, tmp_path: Path
) -> None:
    _changed(whole, tmp_path, lambda _: None, **about)
    with pytest.raises(InputError, match=says):
        train(SMALL, tmp_path, lines_judged=1)
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensor_of_another_shape_is_refused(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    tensors = load_file(whole)
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    if tuple(shape) != tensors[name].shape:
        path = _changed(whole, tmp_path, lambda all_: all_.update({name: torch.zeros(shape)}))
        with pytest.raises(InputError, match=name.removeprefix("model.").replace(".", r"\.")):
            TrainingRun(SMALL).resume(path)


def test_an_intact_state_is_resumed(whole: Path) -> None:
    run = TrainingRun(SMALL)
    run.resume(whole)
    assert run.step == 2
    assert run.seconds == float(_about(whole)["seconds"])
    assert json.loads(_about(whole)["settings"])["steps"] == 3
    assert run.advance() > 0
