"""A saved study loads equal, is whole or absent, and can stand for the study everywhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError, InputError, OutputError
from headwise.files import read_json, write_json
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.report import Sample, Study, TopPairs, _saved
from headwise.report.page import render
from headwise.surgery import Plan
from headwise.tables import Curves, Scores
from planted import TOKENIZER, lines
from studies import make_roles, make_study

TWO_STACKS = ("encoder", "decoder", "decoder.cross")


def _whole_study() -> Study:
    """A study that holds everything a study may hold."""
    study = make_study(relations={"verb": "a verb → its subject"}, stacks=TWO_STACKS)
    heads, rng = study.table.heads, np.random.default_rng(0)
    text = Sample(("a", "b \N{GRINNING FACE}", "<c>"), {}, ("x", "y"))
    maps = {head: _map(text, head, rng) for head in heads}
    pairs = {
        head: TopPairs(np.array([[0, -1], [1, 0]], np.int32), np.eye(2, dtype=np.float32))
        for head in heads
        if head.stack != "encoder"
    }
    received = {
        ("encoder", 0): rng.random(3, np.float32),
        ("decoder", 1): rng.random(2, np.float32),
    }
    samples = (replace(text, weights=maps), replace(text, pairs=pairs, received=received))
    table = replace(study.table, original=(None, *heads[1:]), covered=np.ones((2, len(heads))))
    values = np.array([[[0.25, 0.5], [0.5, 1.5]]])
    curves = Curves(
        np.array([0, 3]), len(heads), {"half-gate": values}, "lm", score="accuracy",
        scores={"half-gate": np.array([[0.9, np.nan]])},
    )  # fmt: skip
    numbers = np.arange(len(heads), dtype=float)
    return replace(study, samples=samples, table=table, roles=make_roles(study)).with_pruning(
        scores=Scores(heads, np.arange(len(heads)), numbers[None], None, "half-gate", "lm"),
        plan=Plan.of(["encoder.L0.H1"], heads, why="a reason"),
        curves=curves,
    )


def _map(text: Sample, head: hw.Head, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(len(text.side(side)) for side in text.sides(head))
    return rng.random(shape, np.float32)


def test_a_saved_study_loads_equal(tmp_path: Path) -> None:
    study = _whole_study()
    loaded = hw.load_study(study.save(tmp_path / "study"))
    assert render(loaded) == render(study)
    for name in study.table.statistics:
        for mine, theirs in zip(
            study.table.totals[name].columns().values(),
            loaded.table.totals[name].columns().values(),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
    assert loaded.table.original == study.table.original
    assert [sample.tokens for sample in loaded.samples] == [s.tokens for s in study.samples]
    assert loaded.plan == study.plan
    assert {p.name for p in (tmp_path / "study").iterdir()} == {
        "study.json", "arrays.safetensors", "roles.json", "scores.json", "plan.json",
    }  # fmt: skip


def test_saved_studies_compare_as_studies_do(tmp_path: Path) -> None:
    request = hw.Request(per_text=True)
    folders, studies = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=2, d_model=16, n_heads=2)
        # The texts are longer than 8 tokens: the sums of their pieces are added up by text.
        study = hw.study(MiniGPT(config), TOKENIZER, lines(32), request=request, max_tokens=8)
        assert len(study.table.per_text("entropy").count) == 32
        studies.append(study)
        folders.append(study.save(tmp_path / str(seed)))
    expected = hw.compare(*studies).frame()
    assert hw.compare(*folders).frame().equals(expected)
    assert hw.compare(str(folders[0]), studies[1]).frame().equals(expected)
    assert not expected.query("outcome == 'changed'").empty


def test_a_failed_save_leaves_the_old_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study()
    folder = study.save(tmp_path / "study")
    with pytest.raises(OutputError, match=r"study exists\. Choose another folder, or pass force"):
        study.save(folder)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    with pytest.raises(
        OutputError, match=r"other holds model\.safetensors, which headwise did not"
    ):
        study.save(tmp_path / "other", force=True)
    assert (tmp_path / "other" / "model.safetensors").exists()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_saved, "write_arrays", fail)
    with pytest.raises(OutputError, match="No space left"):
        replace(study, title="new").save(folder, force=True)
    assert hw.load_study(folder).title == "Mini-GPT"
    assert {path.name for path in tmp_path.iterdir()} == {"study", "other"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "headwise-study/9"}, r"its format is 'headwise-study/9'"),
        ({"title": 3}, "3 is not a text"),
        ({"model": {"class": []}}, r"class is \[\], neither a text nor a number"),
        ({"samples": [{"tokens": "abc", "targets": []}]}, "'abc' is not a list"),
        ({"samples": [{"tokens": ["a"], "targets": [], "weights": [["L0.H9"]]}]}, "does not have"),
        ({"samples": [{"tokens": ["a"], "targets": [], "weights": [[]]}]}, "weights of no head"),
        (
            {"samples": [{"tokens": ["a"], "targets": [], "weights": [["L0.H1"]]}]},
            r"not float32 of",
        ),
    ],
)
def test_a_changed_study_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    folder = make_study().save(tmp_path / "study")
    facts = folder / "study.json"
    write_json(read_json(facts, "test", "") | change, facts)
    with pytest.raises(InputError, match=rf"load_study: .*study.* holds no study \(.*{message}"):
        hw.load_study(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": ["L0.H0", "L0.H0"]}, "2 rows of 1 heads"),
        ({"heads": ["L0.H99999999"]}, "a layer or head with the number 99999999; below 16384"),
        ({"original": ["L0.H0"]}, "1 original addresses of 8 heads"),
        ({"statistics": ["entropy", "entropy"]}, "a statistic is listed twice"),
        ({"heads": ["L0.H0"]}, r"kv_heads is int64 of \(8,\), not int64 of \(1,\)"),
    ],
)
def test_a_changed_table_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    folder = make_study().save(tmp_path / "study")
    content = read_json(folder / "study.json", "test", "")
    write_json(content | {"table": content["table"] | change}, folder / "study.json")
    with pytest.raises(InputError, match=message):
        hw.load_study(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 2}, "curves of 2 heads"),
        ({"losses": []}, "a curve without losses"),
        ({"score": "accuracy"}, "scores of"),
    ],
)
def test_changed_curves_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    curves = Curves(np.array([0, 3]), 8, {"half-gate": np.zeros((1, 2, 2))}, "lm")
    folder = make_study().with_pruning(curves=curves).save(tmp_path / "study")
    content = read_json(folder / "study.json", "test", "")
    write_json(content | {"curves": content["curves"] | change}, folder / "study.json")
    with pytest.raises(InputError, match=message):
        hw.load_study(folder)


def test_pairs_beyond_the_keys_and_maps_of_several_shapes_are_refused(tmp_path: Path) -> None:
    head = hw.Head("", 0, 0)
    pairs = {head: TopPairs(np.array([[7]], np.int32), np.ones((1, 1), np.float32))}
    study = replace(make_study(), samples=(Sample(("a",), {}, (), pairs),))
    with pytest.raises(InputError, match=r"samples\.0\.keys\.0 holds positions beyond 1 keys"):
        hw.load_study(study.save(tmp_path / "pairs"))
    folder = _whole_study().save(tmp_path / "maps", force=True)
    content = read_json(folder / "study.json", "test", "")
    first, second, third = content["samples"][0]["weights"]
    content["samples"][0]["weights"] = [[first[0], third[0]], second]
    write_json(content, folder / "study.json")
    with pytest.raises(InputError, match="maps of one shape for heads of several"):
        hw.load_study(folder)


def test_results_of_another_model_are_refused(tmp_path: Path) -> None:
    study = make_study()
    folder = study.with_roles(make_roles(study)).save(tmp_path / "study")
    replace(make_roles(study), model="other").save(folder / "roles.json")
    with pytest.raises(InputError, match="roles of the model other, not 5f1d0c9a7e3b4466"):
        hw.load_study(folder)
    Plan.of("L9.H1", [hw.Head("", 9, 0), hw.Head("", 9, 1)]).save(folder / "plan.json")
    make_roles(study).save(folder / "roles.json")
    with pytest.raises(InputError, match=r"plan of L9\.H1, which the table does not have"):
        hw.load_study(folder)


def test_what_is_no_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load_study: .*absent is not .* no study\.json"):
        hw.load_study(tmp_path / "absent")
    with pytest.raises(OutputError, match=r"'.ud800', a lone surrogate, in one of its texts"):
        replace(make_study(), title="\ud800").save(tmp_path / "study")
    assert not (tmp_path / "study").exists()
    with pytest.raises(InputError, match="load_study: gpt2 is not the folder of a study"):
        hw.compare("gpt2", make_study())
    with pytest.raises(ArgumentError, match="were not kept before"):
        hw.compare(make_study().save(tmp_path / "without"), make_study())
