"""Whatever a file contains, its reader gives a usable object or our error with the path."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise import MultiHeadAttention, load, save
from headwise.corpora import (
    Grammar,
)
from headwise.errors import HeadwiseError, OutputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.lab import load as load_lab
from headwise.lab import save as save_lab
from headwise.models.checkpoints import _save
from headwise.roles import Roles
from headwise.scoring._checkpoint import ScoringCheckpoint
from headwise.surgery import Costs, LayerPlan, Plan
from headwise.tables import HeadTable, Scores
from mutations import mutations
from small_files import HEADS, NAMES, SCORES, TEXTS
from studies import make_roles, make_study


@dataclass(frozen=True)
class Door:
    """The file to break, how it is read, and a use of the result that proves it."""

    path: Path
    read: Callable[[Path], Any]
    use: Callable[[Any], object] = repr


def _saved(folder: Path, ending: str) -> dict[str, Door]:
    study = make_study(layers=1, heads=2)
    roles = make_roles(study)
    doors = {
        "HeadTable": (study.table, HeadTable.load),
        "Scores": (SCORES, Scores.load),
        "Roles": (roles, Roles.load),
    }

    used = count()

    def use(table: Any) -> None:
        # The result can be shown and saved again; showing it is slow, so only a few times.
        try:
            table.save(folder / "again.json")
        except OutputError as error:  # JSON has no infinity; 1e999 in a file is one
            if "cannot hold an infinite number" not in str(error):
                raise
        if next(used) % 16 == 0:
            assert repr(table)
            assert table._repr_html_()

    return {
        f"{name}{ending}": Door(thing.save(folder / f"{name}{ending}"), read, use)
        for name, (thing, read) in doors.items()
    }


def _plans(folder: Path) -> dict[str, Door]:
    each = {"parameters": np.ones(3)}
    seconds = {("", 0): np.arange(3.0), ("", 1): np.arange(2.0)}
    costs = Costs(HEADS, SCORES.kv_heads, each, each, "abc", seconds)
    plan = Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason", {"parameters": (3.0, 2.0)})
    return {
        "Plan": Door(
            plan.save(folder / "plan.json"),
            Plan.load,
            lambda plan: (str(plan), plan.save(folder / "again")),
        ),
        "Costs": Door(
            costs.save(folder / "costs.json"),
            Costs.load,
            lambda costs: (str(costs), costs.save(folder / "again")),
        ),
    }


def _models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Door]:
    monkeypatch.setattr(_save, "check_fresh", lambda *_: None)
    tokenizer = make_tokenizer(Grammar().vocabulary)
    model = MiniGPT(MiniGPTConfig(len(Grammar().vocabulary), 7, 6, 2, n_layers=1, mlp_ratio=1))
    lab = save_lab(model, tokenizer, folder / "lab")
    layer = save(MultiHeadAttention(6, 2), folder / "layer")
    doors = {f"lab {path.name}": Door(path, lambda p: load_lab(p.parent)) for path in lab.iterdir()}
    doors |= {
        f"layer {path.name}": Door(path, lambda p: load(p.parent)) for path in layer.iterdir()
    }

    def resume(path: Path) -> ScoringCheckpoint:
        kept = ScoringCheckpoint(path, {"of": "these"})
        kept.table("found", 2, 3)
        return kept

    kept = ScoringCheckpoint(folder / "part", {"of": "these"})
    with kept.saving():
        kept.table("found", 2, 3)[0] = torch.arange(3.0)
    return doors | {"unfinished scores": Door(folder / "part", resume)}


def _texts(folder: Path) -> dict[str, Door]:
    doors = {}
    for name, (content, read) in TEXTS.items():
        path = folder / NAMES.get(name, name)
        path.write_text(content, "utf-8")
        doors[name] = Door(path, read)
    return doors


KINDS = (".parquet", ".csv", ".json", "plans", "models", "texts")


@pytest.fixture(params=KINDS)
def doors(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Door]:
    if request.param.startswith("."):
        return _saved(tmp_path, request.param)
    if request.param == "models":
        return _models(tmp_path, monkeypatch)
    return {"plans": _plans, "texts": _texts}[request.param](tmp_path)


@pytest.mark.parametrize(
    "n", [pytest.param(100, id="some"), pytest.param(1000, id="many", marks=pytest.mark.full)]
)
def test_a_broken_file_is_read_or_refused(doors: dict[str, Door], n: int) -> None:
    raw: dict[str, bytes] = {}
    refused = 0
    for name, door in doors.items():
        whole = door.path.read_bytes()
        door.use(door.read(door.path))  # before the file is broken
        for content in mutations(whole, n, seed=sum(name.encode())):
            door.path.write_bytes(content)
            try:
                loaded = door.read(door.path)
            except HeadwiseError as error:
                refused += 1
                if door.path.name not in str(error) and door.path.parent.name not in str(error):
                    raw.setdefault(f"{name}: no path in {error}", content[:200])
                continue
            except Exception as error:
                raw.setdefault(f"{name}: {type(error).__name__}: {error}"[:200], content[:200])
                continue
            try:
                door.use(loaded)
            except Exception as error:
                raw.setdefault(
                    f"{name}, used: {type(error).__name__}: {error}"[:200], content[:200]
                )
        door.path.write_bytes(whole)
    assert not raw, "\n".join(f"{message}\n    {content!r}" for message, content in raw.items())
    assert refused > len(doors) * n // 10


@pytest.mark.parametrize("name", ["conllu", "gap", "winobias", "jsonl", "pairs", "texts"])
def test_a_line_of_many_megabytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"a" * 20_000_000)
    read = TEXTS[name][1]
    if name == "texts":
        assert len(read(path)[0]) == 20_000_000
        return
    with pytest.raises(HeadwiseError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["conllu", "gap", "winobias", "jsonl", "pairs", "texts"])
def test_carriage_returns_change_nothing(name: str, tmp_path: Path) -> None:
    content, read = TEXTS[name]
    for ending in ("\n", "\r\n"):
        (tmp_path / repr(ending)).write_bytes(content.replace("\n", ending).encode())
    assert read(tmp_path / repr("\n")) == read(tmp_path / repr("\r\n"))
