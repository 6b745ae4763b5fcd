"""`headwise compare` on small untrained models and their tables."""

import json
import re
from pathlib import Path

import pytest
import torch

from command import headwise
from headwise.lab import MiniGPT, MiniGPTConfig, save
from headwise.report import Comparison
from planted import TOKENIZER, lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    torch.manual_seed(0)
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(size, n_layers=2, n_heads=2, d_model=16, context=48))
    save(model, folder / "before", tokenizer=TOKENIZER)
    with torch.no_grad():
        model.blocks[1].attention.q_proj.weight[:8] *= 3
    save(model, folder / "after", tokenizer=TOKENIZER)
    (folder / "texts.txt").write_text("\n".join(lines(32)), "utf-8")
    for name in ("before", "after"):
        done = headwise(
            "observe", folder / name, "--text", folder / "texts.txt", "--per-text",
            "-o", folder / f"{name}.parquet",
        )  # fmt: skip
        assert done.code == 0, done.err
    return folder


def test_two_models_are_compared(place: Path) -> None:
    models = place / "before", place / "after"
    saved, figure = place / "compare.csv", place / "compare.svg"
    done = headwise(
        "compare", *models, "--text", place / "texts.txt", "-o", saved, "--figure", figure
    )
    assert done.code == 0, done.err
    assert done.out.startswith("1 of 4 heads differs on 32 texts.")
    assert "of L1.H0" in done.out
    comparison = Comparison.load(saved)
    assert comparison.summary == done.out.strip()
    assert comparison.titles == (f"{place.name}/before", f"{place.name}/after")
    assert "after − before" in figure.read_text("utf-8")
    printed = headwise("compare", *models, "--text", place / "texts.txt").out
    sizes = [abs(float(x)) for x in re.findall(r"L1.H0 .*", printed) for x in [x.split()[5]]]
    assert sizes == sorted(sizes)  # the largest stands next to the prompt
    assert len(sizes) > 1


def test_two_tables_are_compared(place: Path) -> None:
    tables = place / "before.parquet", place / "after.parquet"
    done = headwise("compare", *tables, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert {row["name"] for row in rows if row["outcome"] == "changed"} == {"L1.H0"}
    assert "1 of 4 heads differs" in done.err
    printed = headwise("compare", *tables)
    assert "L1.H0" in printed.out.splitlines()[2]
