"""Every loader of a file, with a small valid file for each."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import headwise as hw
from folders import write_llama
from headwise._checkpoint import TrainingCheckpoint
from headwise.caching import CachePlan, load_duo_attention, save_duo_attention
from headwise.checkpoints import _save, source_files
from headwise.corpora import Example, Grammar, read_examples
from headwise.errors import OutputError
from headwise.head_effects import Removal
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer
from headwise.lab import save as save_lab
from headwise.lab._train import TrainingRun
from headwise.report import Comparison, compare_tables
from headwise.roles import Roles
from headwise.surgery import Costs, LayerPlan, Plan
from headwise.tables import Curves, HeadTable, Scores
from small_files import HEADS, NAMES, SCORES, TEXTS
from studies import make_effects, make_roles, make_study
from tables_of_texts import make_table


@dataclass(frozen=True)
class Loader:
    """A file, how it is read, and a use of the result that proves it."""

    path: Path
    read: Callable[[Path], Any]
    use: Callable[[Any], object] = repr


Loaders = dict[str, Loader]


def _tables(folder: Path, ending: str) -> Loaders:
    study = make_study(layers=1, heads=2)
    roles = make_roles(study)
    tables = [make_table(6, 1, 2, seed=seed) for seed in range(2)]
    examples = pd.DataFrame({"tokens": [[1, 2], [3]], "right": 4, "other": -1, "before": 1.5})
    examples["after"] = [0.5, 2.0]
    removal = Removal(("L0.H1",), 1.5, 1.25, -0.25, -1.0, 0.5, 1.0, (-0.5,), examples)
    loaders = {
        "HeadTable": (study.table, HeadTable.load),
        "Scores": (SCORES, Scores.load),
        "Roles": (roles, Roles.load),
        "Comparison": (compare_tables(*tables), Comparison.load),
        "Removal": (removal, Removal.load),
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
            assert isinstance(table, Removal) or table._repr_html_()

    return {
        f"{name}{ending}": Loader(thing.save(folder / f"{name}{ending}"), read, use)
        for name, (thing, read) in loaders.items()
    }


def _plans(folder: Path) -> Loaders:
    each = {"parameters": np.ones(3)}
    seconds = {("", 0): np.arange(3.0), ("", 1): np.arange(2.0)}
    costs = Costs(HEADS, SCORES.kv_heads, each, each, "abc", seconds)
    plan = Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason", {"parameters": (3.0, 2.0)})
    cache_plan = CachePlan.of({1: [0]}, n_layers=2, n_kv_heads=2, window=4, sinks=1)
    pattern = save_duo_attention(cache_plan, folder / "pattern")

    def use(loaded: Any) -> None:
        assert str(loaded)
        loaded.save(folder / "again")

    loaders = {
        "Plan": Loader(plan.save(folder / "plan.json"), Plan.load, use),
        "Costs": Loader(costs.save(folder / "costs.json"), Costs.load, use),
        "CachePlan": Loader(cache_plan.save(folder / "cache.json"), CachePlan.load, use),
    }
    return loaders | {
        f"DuoAttention {path.name}": Loader(path, lambda p: load_duo_attention(p.parent), use)
        for path in sorted(pattern.iterdir())
    }


def _task_heads(folder: Path) -> Loaders:
    torch.manual_seed(0)
    config = MiniGPTConfig(60, context=24, d_model=12, n_heads=4, n_kv_heads=2, n_layers=1)
    examples = [Example([n % 7, 4, 5, 6, 7, 8], (5, 6), (0, 2), (2, 4)) for n in range(8)]
    heads = hw.find_heads(MiniGPT(config).eval(), examples, evidence=hw.Evidence(nulls=()))
    lines = folder / "examples.jsonl"
    lines.write_text(
        '{"text": "the red fox . who ?", "query": [14, 17], "right": [[4, 11]], "wrong": [[0, 3]], '
        '"answer": "fox"}\n{"ids": [1, 2, 3, 4], "query": [3, 4], "right": [0, 1], "wrong": []}\n'
    )
    return {
        "task heads": Loader(
            heads.save(folder / "heads.json"),
            hw.load_heads,
            lambda loaded: (str(loaded), loaded.save(folder / "again.json")),
        ),
        "examples": Loader(lines, read_examples),
    }


def _checkpoints(folder: Path) -> Loaders:
    vocabulary = Grammar().vocabulary
    model = MiniGPT(MiniGPTConfig(len(vocabulary), 7, 6, 2, n_layers=1, mlp_ratio=1))
    lab = save_lab(model, folder / "lab", tokenizer=make_tokenizer(vocabulary))
    readers = {p: hw.load_tokenizer if p.name == "tokenizer.json" else hw.load for p in _files(lab)}
    loaders = {
        f"lab {p.name}": Loader(p, lambda p, read=read: read(p.parent))
        for p, read in readers.items()
    }
    return loaders | {
        "unfinished training": _unfinished_training(folder / "training.safetensors"),
        "unfinished recovery": _unfinished_recovery(folder / "recovery"),
    }


def _unfinished_training(path: Path) -> Loader:
    settings = TrainSettings(steps=3, batch_size=2, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)
    run = TrainingRun(settings, path)
    run.advance()
    run.checkpoint.save()

    def resume(path: Path) -> TrainingRun:
        resumed = TrainingRun(settings, path)
        resumed.checkpoint.resume(settings.steps)
        return resumed

    # The optimizer takes what was read.
    return Loader(path, resume, lambda run: run.advance())


def _unfinished_recovery(path: Path) -> Loader:
    def checkpoint(path: Path) -> TrainingCheckpoint:
        weights = [*torch.nn.Linear(2, 3).parameters()]
        optimizer = torch.optim.AdamW(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        about = {"of": "these"}
        return TrainingCheckpoint(path, about, weights, optimizer, "recover", "recovery")

    def resume(path: Path) -> TrainingCheckpoint:
        kept = checkpoint(path)
        kept.resume(3)
        return kept

    kept = checkpoint(path)
    kept.losses.append(0.5)
    kept.save()
    return Loader(path, resume)


def _hugging_face(folder: Path) -> Loaders:
    words = ("<unk>", "<s>", "</s>", "cats", "sleep")
    write_llama(folder / "model", words, hidden_size=8, num_attention_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_save, "check_fresh", lambda *_: None)
        small = hw.prune(hw.load(folder / "model"), {0: [1]})
        hw.save(small, folder / "small", format="headwise")
    pruned = folder / "small" / "headwise.json"
    layers = Path(shutil.copytree(folder / "small", folder / "layers"))
    (layers / "headwise.json").unlink()
    loaders = {
        "pruned headwise.json": Loader(pruned, lambda p: hw.load(p.parent)),
        "per_layer_config": Loader(layers / "config.json", lambda p: hw.load(p.parent)),
        "modules.json": Loader(_modules(folder / "sentences"), lambda p: source_files(p.parent)),
    }
    for path in _files(folder / "model"):
        is_tokenizer = path.name.startswith("tokenizer")
        read = hw.load_tokenizer if is_tokenizer else hw.load
        loaders[f"Hugging Face {path.name}"] = Loader(path, lambda p, read=read: read(p.parent))
    return loaders


def _modules(folder: Path) -> Path:
    """The modules of a SentenceTransformer, which `save` reads to copy them."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_text("{}")
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": p, "type": f"sentence_transformers.models.{k}"} for p, k in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder / "modules.json"


def _texts(folder: Path) -> Loaders:
    loaders = {}
    for name, (content, read) in TEXTS.items():
        path = folder / NAMES.get(name, name)
        path.write_text(content, "utf-8")
        loaders[name] = Loader(path, read)
    return loaders


def _studies(folder: Path) -> Loaders:
    study = make_study(layers=1, heads=2, sentences=("a b c",))
    order = np.arange(2), np.arange(6.0).reshape(3, 2)
    scores = Scores(study.table.heads, *order, None, "half-gate", "lm")
    plan = Plan.of("L0.H1", study.table.heads)
    curves = Curves(np.array([0, 1]), 2, {"half-gate": np.array([[[0.0, 0.0], [0.5, 1.5]]])}, "lm")
    study = study.with_roles(make_roles(study)).with_effects(make_effects(study))
    saved = study.with_pruning(scores=scores, plan=plan, curves=curves).save(folder / "study")
    used = count()

    def use(loaded: Any) -> None:
        assert str(loaded)
        if next(used) % 16 == 0:
            assert loaded.report(folder / "page.html")

    return {
        f"study {p.name}": Loader(p, lambda p: hw.load_study(p.parent), use) for p in _files(saved)
    }


def _files(folder: Path) -> list[Path]:
    return sorted(folder / name for name in os.listdir(folder))


# How many of a thousand broken files each loader of a kind reads: the most where it costs least.
SHARES = {
    ".parquet": 6, ".csv": 10, ".json": 10, "plans": 40, "task heads": 30, "checkpoints": 10,
    "texts": 50, "Hugging Face": 3, "studies": 10,
}  # fmt: skip
KINDS: dict[str, Callable[[Path], Loaders]] = {
    ".parquet": lambda folder: _tables(folder, ".parquet"),
    ".csv": lambda folder: _tables(folder, ".csv"),
    ".json": lambda folder: _tables(folder, ".json"),
    "plans": _plans,
    "task heads": _task_heads,
    "checkpoints": _checkpoints,
    "texts": _texts,
    "Hugging Face": _hugging_face,
    "studies": _studies,
}
