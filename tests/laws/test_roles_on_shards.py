"""Roles of merged shards equal those that `find_roles` finds on the same texts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import headwise as hw
from corpus_files import write_jsonl, write_texts
from headwise.corpora import AnnotatedText, read_conllu
from headwise.errors import InputError
from headwise.jobs import CorpusJob, RolesRequest, merge_corpus
from headwise.roles import Evidence, Pairs, Roles, TokenText, find_roles
from headwise.roles.testing import digest_of_text, halves_of_texts
from planted import TOKENIZER, Planted, by_frequency, clauses, lines

TEXTS = lines(70)
EVIDENCE = Evidence(nulls=("permuted", "shuffled"), models=2, splits=2, seed=4)
ROUNDING = {"rtol": 1e-3, "atol": 2e-5}  # texts stand in other batches


def two_before(text: TokenText) -> Pairs:
    return [(query, query - 2) for query in range(3, len(text.ids))]


def decoder() -> Planted:
    layers = (("offset -1", "induction"), ("same", "rare"))
    return Planted(layers, causal=True, order=by_frequency(TEXTS))


def make_job(data: Path, out: Path, shards: int, request: RolesRequest | None = None) -> CorpusJob:
    request = request or RolesRequest({"two before": two_before}, EVIDENCE)
    return hw.corpus(decoder(), data, request, out=out, shards=shards, tokenizer=TOKENIZER)


def check_equal(roles: Roles, expected: Roles) -> None:
    assert list(roles.rows) == list(expected.rows)
    for name, column in expected.rows.items():
        if pd.api.types.is_float_dtype(column):
            np.testing.assert_allclose(roles.rows[name], column, err_msg=str(name), **ROUNDING)
        else:
            assert roles.rows[name].tolist() == column.tolist(), name
    assert (roles.notes, roles.meanings, roles.model) == (
        expected.notes,
        expected.meanings,
        expected.model,
    )
    assert [[t[0] for t in texts] for texts in roles.texts.values()] == [
        [t[0] for t in texts] for texts in expected.texts.values()
    ]


@pytest.fixture(scope="module")
def expected() -> Roles:
    relations = {"two before": two_before}
    return find_roles(decoder(), TOKENIZER, TEXTS, relations=relations, evidence=EVIDENCE)


def test_merged_shards_have_the_roles_of_one_process(expected: Roles, tmp_path: Path) -> None:
    # A shard repeats texts of the one before it, and has an empty one.
    repeated = [*TEXTS[:40], TEXTS[3], "", *TEXTS[40:], TEXTS[3], TEXTS[50]]
    job = make_job(write_jsonl(tmp_path / "texts.jsonl", repeated), tmp_path / "run", 3)
    for shard in (2, 0, 1):
        job.run(shard=shard)
    roles = job.merge()
    assert {"previous token", "same token"} <= set(expected.rows["role"][expected.rows["found"]])
    assert roles.notes[0] == expected.notes[0].replace("of 70;", "of 73;") != expected.notes[0]
    check_equal(roles, replace(expected, notes=(roles.notes[0], *expected.notes[1:])))
    # The folder alone is enough.
    results = enumerate((roles, merge_corpus(tmp_path / "run")))
    saved = [result.save(tmp_path / f"{number}.json") for number, result in results]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def conllu(texts: list[AnnotatedText]) -> str:
    """The texts as CoNLL-U; a word without an arc hangs on the first one."""
    sentences = []
    for text in texts:
        above = {0: "0\troot"}
        above |= {arc.dependent: f"{arc.head + 1}\t{arc.relation}" for arc in text.arcs}
        rows = [f"# text = {text.text}"]
        for number, (start, end) in enumerate(text.words):
            word, head = text.text[start:end], above.get(number, "1\tdep")
            tag = text.tags[number] if text.tags else "X"
            rows.append(f"{number + 1}\t{word}\t_\t{tag}\t_\t_\t{head}\t_\t_")
        sentences.append("\n".join(rows))
    return "\n\n".join(sentences) + "\n\n"


@pytest.mark.full
def test_trees_give_the_same_roles_too(tmp_path: Path) -> None:
    path = tmp_path / "trees.conllu"
    path.write_text(conllu(clauses(70)), "utf-8")
    job = make_job(path, tmp_path / "run", 3, RolesRequest(evidence=EVIDENCE))
    job.run()
    roles = find_roles(decoder(), TOKENIZER, read_conllu(path), evidence=EVIDENCE)
    assert any("→" in role for role in roles.rows["role"])
    check_equal(job.merge(), roles)


@pytest.mark.full
def test_the_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "lines.txt", TEXTS)
    saved = set()
    for workers in (1, 2):
        job = make_job(data, tmp_path / f"run{workers}", 4, RolesRequest(evidence=EVIDENCE))
        job.run(workers=workers)
        saved.add(job.merge().save(tmp_path / f"{workers}.parquet").read_bytes())
    assert len(saved) == 1


@pytest.mark.parametrize("seed", [0, 5])
def test_halves_depend_on_what_texts_say_alone(seed: int) -> None:
    digests = [digest_of_text(text) for text in TEXTS]
    half = halves_of_texts(digests, seed)
    order = np.random.default_rng(seed).permutation(len(TEXTS))
    moved = halves_of_texts([digests[index] for index in order], seed)
    assert (moved == half[order]).all()
    assert half.sum() == len(TEXTS) // 2
    assert (half != halves_of_texts(digests, seed, 1)).any()
    assert (half != halves_of_texts(digests, seed + 1)).any()


def test_another_request_or_model_is_refused(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "lines.txt", TEXTS)
    make_job(data, tmp_path / "run", 2)
    other = RolesRequest({"two before": two_before}, Evidence(seed=5))
    with pytest.raises(InputError, match="measured is of evidence of nulls"):
        make_job(data, tmp_path / "run", 2, other)
    with pytest.raises(InputError, match="measured is of kind 'roles', not 'statistics'"):
        hw.corpus(decoder(), data, out=tmp_path / "run", shards=2, tokenizer=TOKENIZER)
    with pytest.raises(InputError, match="of relations of two before"):
        make_job(data, tmp_path / "run", 2, RolesRequest({}, EVIDENCE))
    with pytest.raises(InputError, match=r"lacks 2 of 2 shards, with the numbers 0-1"):
        merge_corpus(tmp_path / "run")
