"""The study of heads and `W_O`: a tiny run of its script, and pages that show what it found."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "heads_and_output_projection.py"
PAGE, RESULTS = ROOT / "docs" / "heads-study.md", ROOT / "benchmarks" / "results"
RUNS = RESULTS / "heads-study.json"
TINY = ("--steps", "2", "--d-model", "6", "--layers", "1", "--batch", "3", "--lines", "5")

_spec = importlib.util.spec_from_file_location("heads_study", SCRIPT)
study = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(study)


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    study.main(["--out", str(out), *TINY, *arguments])
    return json.loads(out.read_text("utf-8"))["runs"]


def test_a_tiny_run_trains_every_combination_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "runs.json"
    again = run(out, "--heads", "1", "--W_O", "none", "--seeds", "1")
    rows = run(out, "--heads", "1", "3", "--seeds", "1", "0")
    assert rows[0] == again[0]
    kinds = [(row["n_heads"], row["W_O"], row["seed"]) for row in rows]
    assert len(kinds) == len(set(kinds)) == 2 * 3 * 2
    assert all(row["loss"] > 0 and 0 <= row["translation"] <= 1 for row in rows)
    without = {row["W_O"]: row["parameters"] for row in rows}
    assert without["drawn"] == without["identity"] == without["none"] + 36
    printed = capsys.readouterr().out
    assert study.table(rows) in printed
    assert "| 3, not 1 |" in printed


def test_the_same_seed_gives_the_same_model(tmp_path: Path):
    first, second = (run(tmp_path / name, "--heads", "2", "--seeds", "3") for name in ("a", "b"))
    assert [row | {"seconds": 0} for row in first] == [row | {"seconds": 0} for row in second]


def test_tables_show_means_ranges_and_paired_changes():
    def row(n_heads: int, W_O: str, seed: int, loss: float) -> dict[str, Any]:
        kind = {"n_heads": n_heads, "W_O": W_O, "seed": seed}
        return kind | {"loss": loss, "conjugation": 0.5, "translation": 0.25, "parameters": 1234}

    rows = [row(1, "drawn", 0, 1.0), row(1, "drawn", 1, 2.0), row(1, "none", 0, 1.5),
            row(1, "none", 1, 1.0), row(2, "none", 0, 9.0)]  # fmt: skip
    assert study.table(rows).splitlines()[2:4] == [
        "| 1 | drawn | 1,234 | 1.500 (1.000–2.000) | 50% (50%–50%) | 25% (25%–25%) |",
        "| 1 | none | 1,234 | 1.250 (1.000–1.500) | 50% (50%–50%) | 25% (25%–25%) |",
    ]
    assert study.compare(rows, "W_O").splitlines()[2:] == [
        "| none, not drawn | -0.250 (1 of 2 up) | +0.000 (0 of 2 up) | +0.000 (0 of 2 up) |"
    ]
    assert "| 2, not 1 | +7.500 (1 of 1 up) |" in study.compare(rows, "n_heads")


def test_the_pages_show_the_results():
    held, page = json.loads(RUNS.read_text("utf-8")), PAGE.read_text("utf-8")
    results = (RESULTS / "heads-study.md").read_text("utf-8")
    rows = held["runs"]
    assert len(rows) == 4 * 3 * 3
    assert study.table(rows) in results
    for name in ("W_O", "n_heads"):
        assert study.compare(rows, name) in page
    assert f"torch {held['machine']['torch']}" in results


def test_the_page_uses_the_settings_of_the_script(tmp_path: Path):
    settings = json.loads(RUNS.read_text("utf-8"))["settings"]
    options = study.parse([])
    for name in ("d_model", "n_layers", "steps", "batch_size", "learning_rate"):
        assert settings[name] == getattr(options, name)
