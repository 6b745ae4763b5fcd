"""The work that is killed at random moments: verbs that write results, and how these are read."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime
import torch

import headwise as hw
from folders import tiny_bert, tiny_llama
from headwise import _checkpoint
from headwise.caching import CachePlan, load_duo_attention, save_duo_attention
from headwise.checkpoints import _save
from headwise.corpora import Example, Grammar
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, train
from headwise.lab import load as load_lab
from headwise.lab import save as save_lab
from headwise.report import Comparison, compare_tables
from headwise.surgery import LayerPlan, Plan
from headwise.tables import save_figure
from studies import make_study
from tables_of_texts import make_table

SETTINGS = TrainSettings(steps=24, batch_size=2, d_model=8, n_heads=2, n_layers=1, mlp_ratio=1)


@dataclass(frozen=True)
class Verb:
    """Work that writes results into a folder.

    Attributes:
        work: Writes the results; started again after a kill.
        read: The content of the results in a folder, through their loader; "" if there are none.
        old: Writes results that the work replaces.
        named_by: A file without which the others of a folder are not read, if they are replaced
            one by one.
    """

    work: Callable[[Path], object]
    read: Callable[[Path], str]
    old: Callable[[Path], object] = lambda folder: None
    named_by: str = ""


def _model(seed: int = 0) -> MiniGPT:
    torch.manual_seed(seed)
    config = MiniGPTConfig(len(Grammar().vocabulary), 40, 16, 4, n_layers=3, mlp_ratio=1)
    return MiniGPT(config).eval()


def _batches(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, 40, (4, 20), generator=rng)} for _ in range(4)]


def _train(folder: Path) -> None:
    train(SETTINGS, folder / "run", checkpoint_every=3, lines_judged=4)


def _read_lab(folder: Path) -> str:
    if not (folder / "headwise.json").exists():
        return ""
    load_lab(folder)
    return _digest(folder, "headwise.json", "model.safetensors", "tokenizer.json")


def _observe(folder: Path, seed: int = 0) -> None:
    model = _model()
    with hw.observe(model) as watch, torch.no_grad():
        for batch in _batches(seed):
            model(**batch)
    watch.table().save(folder / "table.json")


def _importance(folder: Path, seed: int = 0) -> None:
    scores = hw.importance(_model(seed), _batches(), "ablation", loss="lm")
    scores.save(folder / "scores.csv")


def _prune(folder: Path, remove: tuple[int, ...] = (1, 2)) -> None:
    small = hw.prune(_model(), {1: list(remove)})
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)


def _export(folder: Path, format: Any, seed: int = 0) -> None:
    model = tiny_bert(seed) if format == "onnx" else tiny_llama(seed)
    hw.save(model, folder / "small", format=format, force=True)


def _read_gguf(folder: Path) -> str:
    tensors = gguf.GGUFReader(folder / "model.gguf").tensors
    return repr([(x.name, x.data.sum()) for x in tensors]) + _digest(folder, *os.listdir(folder))


def _read_onnx(folder: Path) -> str:
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    return repr(session.get_inputs()[0].name) + _digest(folder, "config.json", "onnx/model.onnx")


def _recover(folder: Path, remove: tuple[int, ...] = (0, 3)) -> None:
    small, part = hw.prune(_model(), {0: list(remove)}), folder / "recovery.part"
    hw.recover(small, _model(), _batches(), steps=6, resume=part)
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)
    part.unlink()


def _texts(folder: Path) -> None:
    grammar, rng = Grammar(), np.random.default_rng(0)
    lines = [" ".join(grammar.line(rng).words) for _ in range(60)]
    (folder / "texts.txt").write_text("\n".join(lines))


def _read_small(folder: Path) -> str:
    model = hw.load(folder)
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest() + _digest(folder, *os.listdir(folder))


def _tokenizer() -> Any:
    return make_tokenizer(Grammar().vocabulary)


def _page(folder: Path, heads: int) -> None:
    make_study(layers=6, heads=heads).report(folder / "report.html")


def _read_page(folder: Path) -> str:
    assert (folder / "report.html").read_text("utf-8").rstrip().endswith("</html>")
    return _digest(folder, "report.html")


def _study(folder: Path, heads: int = 3) -> None:
    make_study(layers=2, heads=heads).save(folder / "study", force=True)


def _read_study(folder: Path) -> str:
    return repr(hw.load_study(folder)) + _digest(folder, *os.listdir(folder))


def _compare(folder: Path, seed: int = 1) -> None:
    tables = [make_table(texts=8, seed=each) for each in (0, seed)]
    compare_tables(*tables, draws=20).save(folder / "comparison.json")


def _find_heads(folder: Path, seed: int = 0) -> None:
    examples = [Example([4 + n % 7, 14, 15, 16], (3, 4), (0, 1), (1, 2)) for n in range(8)]
    heads = hw.find_heads(_model(seed), examples, evidence=hw.Evidence(nulls=()))
    heads.save(folder / "heads.json")


def _read_heads(folder: Path) -> str:
    return repr(hw.load_heads(folder / "heads.json")) + _digest(folder, "heads.json")


def _cache(folder: Path, sinks: int = 4) -> None:
    plan = CachePlan.of({1: [0]}, n_layers=2, n_kv_heads=2, window=9 - sinks, sinks=sinks)
    save_duo_attention(plan, folder / "pattern")
    plan.save(folder / "cache.json")


def _read_cache(folder: Path) -> str:
    names = ("config.json", "full_attention_heads.tsv")
    return repr(load_duo_attention(folder)) + _digest(folder, *names)


def _plan(folder: Path, remove: tuple[int, ...] = (1,)) -> None:
    Plan((LayerPlan("", 0, 3, remove),), "abc", "a reason").save(folder / "plan.json")


def _figure(folder: Path, statistic: str = "entropy") -> None:
    save_figure(make_study().table.plot(statistic), folder / "figure.svg")


def _read_table(kind: Any, folder: Path, name: str) -> str:
    return repr(kind.load(folder / name)) + _digest(folder, name)


def _digest(folder: Path, *names: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


VERBS = {
    "train": Verb(_train, lambda folder: _read_lab(folder / "run"), named_by="headwise.json"),
    "save": Verb(
        lambda folder: save_lab(_model(1), _tokenizer(), folder),
        _read_lab,
        lambda folder: save_lab(_model(0), _tokenizer(), folder),
        named_by="headwise.json",
    ),
    "observe": Verb(
        _observe,
        lambda folder: _read_table(hw.HeadTable, folder, "table.json"),
        lambda folder: _observe(folder, seed=1),
    ),
    "importance": Verb(
        _importance,
        lambda folder: _read_table(hw.Scores, folder, "scores.csv"),
        lambda folder: _importance(folder, seed=1),
    ),
    "prune": Verb(
        _prune, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "gguf": Verb(
        lambda folder: _export(folder, "gguf"),
        lambda folder: _read_gguf(folder / "small"),
        lambda folder: _export(folder, "gguf", seed=1),
    ),
    "onnx": Verb(
        lambda folder: _export(folder, "onnx"),
        lambda folder: _read_onnx(folder / "small"),
        lambda folder: _export(folder, "onnx", seed=1),
    ),
    "recover": Verb(
        _recover, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "study": Verb(_study, lambda folder: _read_study(folder / "study"), lambda f: _study(f, 2)),
    "compare": Verb(
        _compare,
        lambda folder: _read_table(Comparison, folder, "comparison.json"),
        lambda folder: _compare(folder, seed=2),
    ),
    "heads": Verb(_find_heads, _read_heads, lambda folder: _find_heads(folder, seed=1)),
    "cache pattern": Verb(
        _cache,
        lambda folder: _read_cache(folder / "pattern"),
        lambda folder: _cache(folder, 2),
        named_by="config.json",
    ),
    "plan": Verb(
        _plan,
        lambda folder: repr(Plan.load(folder / "plan.json")) + _digest(folder, "plan.json"),
        lambda folder: _plan(folder, (0, 2)),
    ),
    "figure": Verb(
        _figure,
        lambda folder: _digest(folder, "figure.svg"),
        lambda folder: _figure(folder, "first"),
    ),
    "report": Verb(lambda folder: _page(folder, 12), _read_page, lambda folder: _page(folder, 8)),
}


def write_often(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let work write its state at every step, and skip the check of saved models.

    The fresh process that opens a saved model takes seconds and writes no result.
    """
    set_attribute(_save, "check_fresh", lambda *_: None)
    set_attribute(_checkpoint, "_SECONDS", 0.0)
    set_attribute(_checkpoint, "_COMPUTE_PER_WRITE", 0.0)
