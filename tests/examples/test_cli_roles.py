"""`headwise roles` on a small untrained model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from command import headwise
from headwise.corpora import Grammar, annotate
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save
from headwise.roles import Roles
from small_files import COLUMNS
from studies import make_roles, make_study


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    grammar, rng = Grammar(), np.random.default_rng(0)
    torch.manual_seed(0)
    config = MiniGPTConfig(len(grammar.vocabulary), n_layers=1, n_heads=2, d_model=16)
    save(MiniGPT(config), folder / "model", tokenizer=make_tokenizer(grammar.vocabulary))
    texts = [annotate(grammar.sentence(rng)) for _ in range(12)]
    lines = [
        json.dumps(
            {
                "text": text.text,
                "words": text.words,
                "arcs": [(arc.dependent, arc.head, arc.relation) for arc in text.arcs],
            }
        )
        for text in texts
    ]
    (folder / "texts.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "texts.txt").write_text("\n".join(text.text for text in texts), "utf-8")
    row = "1\tThe cook sang because she could\tshe\t22\tThe cook\t0\tTRUE\tsang\t9\tFALSE\tu\n"
    (folder / "gap.tsv").write_text(COLUMNS + row, "utf-8")
    return folder


def test_roles_are_written_and_printed(place: Path) -> None:
    out = place / "roles.parquet"
    done = headwise(
        "roles", place / "model", "--spans", place / "texts.jsonl",
        "--coref", place / "gap.tsv", "-o", out, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = {row["role"]: row for row in json.loads(done.out)}  # no head has a role
    assert not any(row["found"] for row in rows.values())
    assert rows["head → nsubj"]["outcome"].startswith("not tested: ")  # too few texts
    assert rows["prefix matching"]["outcome"] == "not found"  # on random sequences
    assert "13 distinct texts of 13" in done.err
    roles = Roles.load(out)
    roles_of_file = {"nsubj → head", "pronoun → antecedent", "prefix matching"}
    assert roles_of_file <= set(roles.frame()["role"])
    assert set(roles.frame()["name"]) == {"L0.H0", "L0.H1"}


def test_nulls_can_be_omitted_and_own_pairs_are_read(place: Path) -> None:
    words, pairs = [[0, 1], [2, 6], [7, 9], [10, 15]], [[2, 0, "source"], [3, 1, "source"]]
    out, linked = place / "linked.csv", place / "linked.jsonl"
    linked.write_text(json.dumps({"text": "I sing yo canto", "words": words, "pairs": pairs}))
    done = headwise("roles", place / "model", "--spans", linked, "--nulls", "none", "-o", out)
    assert done.code == 0, done.err
    assert "1 pass over the texts" in done.err
    assert "source" in set(Roles.load(out).frame()["role"])
    assert done.out.splitlines()[1].startswith("source ")  # built-in roles follow


def test_without_an_output_the_roles_are_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = make_roles(make_study(), with_role=(0, 3))
    monkeypatch.setattr("headwise.roles.find_roles", lambda *_, **__: roles)
    done = headwise("roles", place / "model", "--text", place / "texts.txt")
    assert done.code == 0
    assert f"{roles}\n" in done.err
    header, first, second, outcomes, outcome = done.out.splitlines()
    assert header.split() == ["role", "effect", "baseline", "null", "lift", "p_adj"]
    assert [row.split()[0] for row in (first, second)] == roles.found()["name"].tolist()
    columns = ["heads", "nearest", "effect", "baseline", "smallest", "outcome"]
    assert outcomes.split() == columns
    assert outcome.split() == [
        *("previous", "token", "2", "L0.H0", "0.875", "0.25", "0.5"),
        *("found,", "against", "previous", "token"),
    ]


def test_without_roles_the_outcomes_say_why(place: Path) -> None:
    (place / "few.txt").write_text("I sing\n", "utf-8")
    arguments = ("roles", place / "model", "--text", place / "few.txt", "--nulls", "none")
    done = headwise(*arguments)
    assert done.code == 0
    assert done.out.startswith("none\n")
    assert "not tested: 1 held-out text, 30 needed" in done.out
    assert "Of 1 text no role of text can be tested" in done.err.split("0 heads have 0 roles")[0]
