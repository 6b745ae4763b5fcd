"""A command that reads a broken or missing file ends with its result or one clear line."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from command import headwise
from folders import write_llama
from headwise import load
from headwise.models import fingerprint
from headwise.tables import Scores
from mutations import mutations
from small_files import COLUMNS, LINE, MENTIONS, SCORES, TREE

WORDS = ("<pad>", "<s>", "</s>", "a", "b", "Ann", "sang", "do", "go", "[UNK]")
# The file to break, and the command that reads it.
COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "trees.conllu": (TREE * 2, ("roles", "model", "--conllu", "trees.conllu", "-o", "roles.json")),
    "coref.tsv": (COLUMNS + MENTIONS, ("roles", "model", "--coref", "coref.tsv", "--json")),
    "spans.jsonl": (LINE, ("roles", "model", "--spans", "spans.jsonl", "-o", "roles.csv")),
    "texts.txt": (
        "a b Ann\n\nsang a b\n",
        ("observe", "model", "--text", "texts.txt", "-o", "table.csv"),
    ),
    "pairs.csv": (
        "a b,b a,2.5\nAnn sang,sang a,1\n",
        ("importance", "model", "--pairs", "pairs.csv", "-o", "scores.json"),
    ),
    "model/config.json": ("", ("observe", "model", "--text", "good.txt", "-o", "table.json")),
    "model/model.safetensors": ("", ("observe", "model", "--text", "good.txt", "-o", "table.json")),
    "model/tokenizer.json": ("", ("observe", "model", "--text", "good.txt", "-o", "table.json")),
    "by.csv": ("", ("prune", "model", "--by", "by.csv", "--remove", "0.3", "--out", "small")),
    "by.parquet": ("", ("prune", "model", "--by", "by.parquet", "--remove", "1", "--out", "small")),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and every file that the commands read."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "model", WORDS, hidden_size=8, num_attention_heads=2)
    scores = Scores(
        tuple(SCORES.heads), SCORES.kv_heads, SCORES.per_text, model=fingerprint(load("model"))
    )
    for name, (content, _) in COMMANDS.items():
        if content:
            (tmp_path / name).write_text(content, "utf-8")
    for name in ("by.csv", "by.parquet"):
        scores.save(tmp_path / name)
    (tmp_path / "good.txt").write_text("a b Ann\n\nsang a b\n")
    return tmp_path


@pytest.mark.parametrize(
    "n", [pytest.param(6, id="some"), pytest.param(150, id="many", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_with_a_broken_file(name: str, n: int, place: Path) -> None:
    path, arguments = place / name, COMMANDS[name][1]
    whole, problems = path.read_bytes(), {}
    broken = [*mutations(whole, n, seed=sum(name.encode())), None]
    for content in broken:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        try:
            done = headwise(*arguments)
        except Exception as error:
            problems[f"{type(error).__name__}: {error}"[:300]] = content
            continue
        one_line = done.code == 2 and done.err.count("\n") == 1
        if not (done.code == 0 or one_line) or "Traceback" in done.err:
            problems[f"{done.code}: {done.err}"[:300]] = content
        # Without a vocabulary Transformers makes an empty one of the tokenizer's class.
        assert content is not None or one_line or name == "model/tokenizer.json"
    report = {why: None if c is None else c[:300] for why, c in problems.items()}
    assert not problems, json.dumps(report, indent=1, default=repr)
    assert not list(place.rglob(".headwise-*"))
