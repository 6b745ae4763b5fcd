"""A saved study loads equal, is whole or absent, and can stand for the study everywhere."""

import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

import headwise as hw
from headwise._display import first_line
from headwise.caching import CachePlan
from headwise.cli._print import print_table
from headwise.errors import ArgumentError, InputError, OutputError
from headwise.files import read_json, write_json
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.report import Sample, Study, TopPairs, _saved, compare_tables
from headwise.report.page import render
from headwise.surgery import Costs, LayerPlan, Plan
from headwise.tables import Curves, Scores
from planted import TOKENIZER, lines
from small_files import HEADS, SCORES
from studies import make_effects, make_heads, make_roles, make_study
from tables_of_texts import make_table

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
    study = replace(study, samples=samples, table=table).with_roles(make_roles(study))
    return study.with_effects(make_effects(study)).with_pruning(
        scores=Scores(heads, np.arange(len(heads)), numbers[None], None, "half-gate", "lm"),
        plan=Plan.of(["encoder.L0.H1"], heads, why="a reason"),
        curves=curves,
    )


def _map(text: Sample, head: hw.Head, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(len(text.side(side)) for side in text.sides(head))
    return rng.random(shape, np.float32)


def test_a_saved_study_loads_equal(tmp_path: Path) -> None:
    study = _whole_study()
    about = {"skipped": 3, "texts": {"texts": 2, "sha256": "0a"}}
    study = replace(study, table=replace(study.table, **about))
    loaded = hw.load_study(study.save(tmp_path / "study"))
    assert render(loaded) == render(study)
    for name in study.table.statistics:
        for mine, theirs in zip(
            study.table.totals[name].columns().values(),
            loaded.table.totals[name].columns().values(),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
    for field in fields(hw.HeadTable):
        if field.name != "totals":
            parts = (getattr(x.table, field.name) for x in (loaded, study))
            np.testing.assert_equal(*parts)
    assert [sample.tokens for sample in loaded.samples] == [s.tokens for s in study.samples]
    assert loaded.plan == study.plan
    for field in fields(Curves):
        np.testing.assert_equal(*(getattr(x.curves, field.name) for x in (loaded, study)))
    assert {p.name for p in (tmp_path / "study").iterdir()} == {
        "study.json", "arrays.safetensors", "table.parquet", "roles.json", "effects.json",
        "scores.json", "plan.json", "curves.json",
    }  # fmt: skip


def test_saved_studies_compare_as_studies_do(tmp_path: Path) -> None:
    request = hw.Request(per_text=True)
    folders, studies = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=2, d_model=16, n_heads=2)
        # The texts are longer than 8 tokens: the sums of their pieces are added up by text.
        study = hw.study(
            MiniGPT(config), lines(32), tokenizer=TOKENIZER, request=request, max_tokens=8
        )
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


@pytest.mark.parametrize(("part", "change", "message"), [
    ("", {"format": "headwise-study/9"}, r"its format is 'headwise-study/9'"),
    ("", {"title": 3}, "3 is not a text"),
    ("", {"model": {"class": []}}, r"class is \[\], neither a text nor a number"),
    ("", {"samples": [{"tokens": "abc", "targets": []}]}, "'abc' is not a list"),
    ("", {"samples": [{"tokens": ["a"], "targets": [], "weights": [["L0.H9"]]}]}, "not have"),
    ("", {"samples": [{"tokens": ["a"], "targets": [], "weights": [[]]}]}, "weights of no head"),
    ("", {"samples": [{"tokens": ["a"], "targets": [], "weights": [["L0.H1"]]}]}, "not float32"),
    ("curves", {"n_heads": 2}, "3 of 2 heads removed"),
    ("curves", {"per_text": {}}, "a curve without losses"),
    ("curves", {"per_text": {"half-gate": [[[], []]]}}, "a curve without losses"),
    ("curves", {"per_text": {"half-gate": [[["a"]]]}}, "could not convert string"),
    ("curves", {"removed": [3, 4]}, "Give rising points from 0 on"),
    ("curves", {"score": "accuracy"}, "scores of"),
    ("curves", {"scores": {"half-gate": 5}}, r"scores of \(\), losses of \(1, 2, 2\)"),
    ("curves", {"scores": {"half-gate": [[1, 2, 3]]}}, r"scores of \(1, 3\), losses of"),
])  # fmt: skip
def test_a_changed_study_is_refused(part: str, change: Any, message: str, tmp_path: Path) -> None:
    curves = Curves(np.array([0, 3]), 8, {"half-gate": np.zeros((1, 2, 2))}, "lm")
    folder = make_study().with_pruning(curves=curves).save(tmp_path / "study")
    path = folder / f"{part or 'study'}.json"
    write_json(read_json(path, "test", "") | change, path)
    where = (
        r"Curves\.load: .*curves\.json holds no curves" if part else r"load_study: .*holds no study"
    )
    with pytest.raises(InputError, match=rf"{where} \(.*{message}"):
        hw.load_study(folder)


def test_a_study_with_another_table_is_refused(tmp_path: Path) -> None:
    folder = make_study().save(tmp_path / "study")
    far = replace(make_study().table, heads=(*make_heads(4, 2)[:-1], hw.Head("", 99999999, 0)))
    far.save(folder / "table.parquet")
    message = "holds no study .a layer or head with the number 99999999, not below"
    with pytest.raises(InputError, match=message):
        hw.load_study(folder)
    (folder / "table.parquet").unlink()
    with pytest.raises(InputError, match=r"table\.parquet does not exist"):
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
    make_roles(study).save(folder / "roles.json")
    make_effects(make_study(layers=3)).save(folder / "effects.json")
    with pytest.raises(InputError, match=r"effects of L2\.H0, which the table does not have"):
        hw.load_study(folder)
    (folder / "effects.json").unlink()
    comparison = _comparison().save(folder / "comparison.json")
    with pytest.raises(
        InputError, match=r"comparison of \('.*'\), not of the model 5f1d0c9a7e3b4466"
    ):
        hw.load_study(folder)
    comparison.unlink()
    Plan.of("L9.H1", [hw.Head("", 9, 0), hw.Head("", 9, 1)]).save(folder / "plan.json")
    with pytest.raises(InputError, match=r"plan of L9\.H1, which the table does not have"):
        hw.load_study(folder)


def test_what_is_no_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load_study: .*absent is not .* no study\.json"):
        hw.load_study(tmp_path / "absent")
    with pytest.raises(OutputError, match=r"'.ud800', a lone surrogate, in one of its texts"):
        replace(make_study(), title="\ud800").save(tmp_path / "study")
    curves = Curves(np.array([0, 3]), 8, {"\udfff": np.zeros((1, 2, 2))}, "lm")
    table = replace(make_study().table, totals={"\udfff": make_study().table.totals["first"]})
    for change in ({"curves": curves}, {"table": table}):
        with pytest.raises(OutputError, match=r"'.udfff', a lone surrogate, in one of its texts"):
            replace(make_study(), **change).save(tmp_path / "study")
    assert not (tmp_path / "study").exists()
    with pytest.raises(InputError, match="load_study: gpt2 is not the folder of a study"):
        hw.compare("gpt2", make_study())
    with pytest.raises(ArgumentError, match="were not kept before"):
        hw.compare(make_study().save(tmp_path / "without"), make_study())


# A subclass of a result loads as itself.


EACH = {"parameters": np.ones(3)}
RESULTS: dict[str, Callable[[], Any]] = {
    "table.json": lambda: make_study(layers=1, heads=2).table,
    "roles.json": lambda: make_roles(make_study(layers=1, heads=2)),
    "effects.json": lambda: make_effects(make_study(layers=1, heads=2)),
    "scores.json": lambda: SCORES,
    "plan.json": lambda: Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason"),
    "costs.json": lambda: Costs(HEADS, SCORES.kv_heads, EACH, EACH, "abc", {}),
    "cache.json": lambda: CachePlan.of({1: [0]}, n_layers=2, n_kv_heads=2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_subclass_loads_as_itself(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]()
    path = result.save(tmp_path / name)
    subclass = type("Extended", (type(result),), {})
    loaded = subclass.load(path)
    assert type(loaded) is subclass
    loaded.save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == path.read_bytes()


# What notebooks show: small, well-formed, without a script, whatever the names.


HOSTILE = "</p><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m"
MANY_HEADS = make_heads(48, 64)


def _scores() -> hw.Scores:
    values = np.random.default_rng(0).random((2, len(MANY_HEADS)))
    return hw.Scores(MANY_HEADS, np.arange(len(MANY_HEADS)), values, method=HOSTILE, loss=HOSTILE)


def _study() -> Study:
    study = make_study(24, 16, title=HOSTILE, relations={HOSTILE: HOSTILE})
    return study.with_roles(make_roles(study, range(100), HOSTILE))


def _comparison() -> Any:
    table = make_table(texts=31, layers=24, heads=16)
    comparison = compare_tables(table, table, draws=1)
    return replace(comparison, titles=(HOSTILE, HOSTILE))


VIEWS: dict[str, Callable[[], Any]] = {
    "study": _study,
    "table": lambda: replace(make_table(layers=24, heads=16), model=HOSTILE),
    "roles": lambda: make_roles(make_study(24, 16), range(300), HOSTILE),
    "scores": _scores,
    "plan": lambda: replace(hw.plan(_scores(), remove=0.3), why=HOSTILE),
    "curves": lambda: Curves(
        np.arange(100), 384, {HOSTILE: np.ones((1, 100, 2)), "b": np.ones((2, 100, 2))}, HOSTILE
    ),
    "cache plan": lambda: replace(
        hw.CachePlan.of({0: [1]}, n_layers=48, n_kv_heads=8), why=HOSTILE
    ),
    "comparison": _comparison,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_its_text_and_its_figure(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, figures = VIEWS[view](), plt.get_fignums()
    html = result._repr_html_()
    assert len(html.encode()) < 1_000_000
    text, image = ElementTree.fromstring(html)
    assert [(text.tag, text.attrib, len(text)), image.tag] == [("pre", {}, 0), "img"]
    assert image.attrib["src"].startswith("data:image/png;base64,")
    assert "\x1b" not in html
    assert plt.get_fignums() == figures  # a notebook would show an open figure a second time
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert ElementTree.fromstring(result._repr_html_()).text == text.text


# The display of tables: a summary and some rows, no wider than the terminal.


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> hw.HeadTable:
    monkeypatch.setenv("COLUMNS", "60")
    layer = hw.MultiHeadAttention(60, 30)
    request = hw.Request(relations={}, classes={}, top=("first",))
    with torch.no_grad(), hw.observe(layer, request) as watch:
        layer(torch.randn(2, 5, 60), causal=True)
    assert repr(watch) == "Watch of MultiHeadAttention: 1 layer captured"
    return watch.table()


def test_a_table_shows_some_rows_as_wide_as_the_terminal(table: hw.HeadTable) -> None:
    title, *lines = repr(table).splitlines()
    assert title == f"HeadTable of 30 heads, model {table.model}"
    assert max(map(len, lines)) <= 60
    names = [line.split()[0] for line in lines if line.startswith("L")]
    blocks = names.count("L0.H0")
    assert blocks > 1
    assert names == [f"L0.H{head}" for head in (*range(6), *range(24, 30))] * blocks
    first = next(line for line in lines if line.startswith("L0.H0"))
    assert first.split()[1] == f"{table.mean('entropy')[0]:.3g}"


def test_scores_and_curves_have_a_short_repr(table: hw.HeadTable) -> None:
    values = np.arange(60.0).reshape(2, 30)
    scores = Scores(table.heads, table.kv_heads, values, method="ablation", loss="lm")
    title, header, first, *_ = repr(scores).splitlines()
    assert title == "Scores of 30 heads by ablation of the loss lm, over 2 texts"
    assert header.split() == ["importance", "ci_low", "ci_high"]
    assert first.split() == ["L0.H0", "15", "0", "30"]
    curves = Curves(np.array([0, 3]), 12, {"mine": np.array([[[0.0, 0.0], [0.5, 1.5]]])}, "lm")
    title, header, *rows = repr(curves).splitlines()
    assert title == "Curves of the loss lm, as some of 12 heads are removed"
    assert rows[1].split()[:3] == ["mine", "3", "1"]


def test_no_object_prints_all_its_arrays() -> None:
    study = make_study()
    for thing in (
        study,
        study.table,
        study.roles,
        hw.costs(hw.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)),
    ):
        assert len(repr(thing)) < 4000
        assert "array(" not in repr(thing)


def test_terminal_control_characters_are_escaped() -> None:
    hostile = "\x1b[31mred\n"
    rows = pd.DataFrame({"name": ["L0.H0"], "role": [hostile], "\x9b2J": [1.0]})
    evidence = {"effect": 0.5, "baseline": 0.1, "lift": 0.4, "p_adj": 0.01, "n": 20, "texts": 30}
    roles = hw.Roles(
        rows.assign(found=True, label=hostile, outcome="found", null="", **evidence), {}
    )
    shown = repr(roles)
    assert "red" in shown
    assert not re.search("[\x1b\x9b]", shown)


def test_only_a_terminal_limits_the_width(
    table: hw.HeadTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for stream, most in ((Terminal(), 60), (StringIO(), 1000)):
        monkeypatch.setattr("sys.stdout", stream)
        print_table(table.frame())
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= most
        assert (len(lines) == 31) == (most == 1000)


def test_an_error_in_another_message_is_its_first_line_or_its_type() -> None:
    errors = ("no shape.\nmore", "", " \n", "In a class:\n  no shape.\nmore", "no shape of a head")
    said = [first_line(ValueError(text), 22) for text in errors]
    assert said == [
        "no shape",
        "ValueError",
        "ValueError",
        "In a class: no shape",
        "no shape of a head",
    ]
    assert [first_line(ValueError(errors[-1]), most) for most in (10, 3)] == ["no shape …", "no …"]
