"""A command writes what the library gives for the same inputs, and prints it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.corpora import read_answers, read_examples, read_jsonl
from headwise.report import Comparison, Study
from headwise.roles import load_heads, task_examples
from headwise.surgery import plan_curves
from small_files import COLUMNS
from studies import make_roles, make_study

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
WORDS += ("The", "cook", "sang", "because", "she", "could", "river", "green", "stone", "music")
LINES = ["I work you work", "he works", "they work he works I work", "you work they work"] * 8
NONE = hw.Evidence(nulls=())


class Inputs(NamedTuple):
    """The folder of the commands, and what is in it."""

    place: Path
    model: Any
    tokenizer: Any


class Case(NamedTuple):
    """A command, the file it writes, how that is read, and what the library gives.

    Attributes:
        notes: What the command says of it, as a regular expression.
    """

    command: str
    out: str
    load: Callable[[Path], Any]
    expected: Callable[[Inputs], Any]
    notes: str = ""


def _task_heads(at: Inputs) -> Any:
    examples = task_examples("needle", tokenizer=at.tokenizer, n=40, n_tokens=40)
    return hw.find_heads(at.model, examples, tokenizer=at.tokenizer, evidence=NONE, max_tokens=40)


CASES = {
    "importance": Case(
        "importance model --text some.txt --figure scores.svg -o scores.parquet",
        "scores.parquet", hw.Scores.load,
        lambda at: hw.importance(at.model, LINES, tokenizer=at.tokenizer),
        "12 heads by half-gate of the loss lm, over 32 texts"
        "(.|\n)*The least important heads are L[^\n]*: scores.parquet",
    ),
    "importance by another method": Case(
        "importance model --text some.txt --method gradient -o gradient.csv",
        "gradient.csv", hw.Scores.load,
        lambda at: hw.importance(at.model, LINES, "gradient", tokenizer=at.tokenizer),
        "12 heads by gradient of the loss lm",
    ),
    "effects": Case(
        "effects model --examples answers.jsonl --head L0.H1 --figure effects.svg "
        "-o effects.json",
        "effects.json", hw.HeadEffects.load,
        lambda at: hw.effects(
            at.model, read_answers(at.place / "answers.jsonl"), tokenizer=at.tokenizer,
            heads=["L0.H1"],
        ),
        "of 32 distinct examples 16 chose directions, 16 were held out",
    ),
    "heads": Case(
        "heads model --examples examples.jsonl --head L1.H0 --head L0.H1 --nulls none "
        "-o heads.json",
        "heads.json", load_heads,
        lambda at: hw.find_heads(
            at.model, read_examples(at.place / "examples.jsonl"), evidence=NONE,
            heads=["L1.H0", "L0.H1"],
        ),
        "64 distinct examples of 64; the strongest baselines chosen on 32",
    ),
    "heads of a task": Case(
        "heads model --task needle --nulls none --max-texts 40 --save-examples needles.jsonl "
        "-o needle.json",
        "needle.json", load_heads, _task_heads,
    ),
    "roles": Case(
        "roles model --spans spans.jsonl --nulls none --head L0.H1 --role self --role source "
        "-o roles.parquet",
        "roles.parquet", hw.Roles.load,
        lambda at: hw.find_roles(
            at.model, read_jsonl(at.place / "spans.jsonl"), tokenizer=at.tokenizer, evidence=NONE,
            heads="L0.H1", roles=["self", "source"],
        ),
        "4 distinct texts of 12(.|\n)*1 pass over the texts",
    ),
    "cache": Case(
        "cache model --text some.txt --window 2 --sinks 1 -o plan.json",
        "plan.json", hw.CachePlan.load,
        lambda at: hw.cache_plan(
            at.model, LINES, tokenizer=at.tokenizer, keep=0.5, window=2, sinks=1
        ),
        "of 6 kv heads keep all tokens, the others 1 first and 2 last ones"
        "(.|\n)*cache of 1,024 tokens: [\\d,]+ bytes before, [\\d,]+ after",
    ),
    "compare": Case(
        "compare model other --text some.txt --figure compare.svg -o compare.csv",
        "compare.csv", Comparison.load,
        lambda at: hw.compare(
            at.model, hw.load(at.place / "other"), LINES, tokenizer=at.tokenizer
        ),
    ),
}  # fmt: skip


def _lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    place = tmp_path_factory.mktemp("commands")
    write_llama(
        place / "model", WORDS, hidden_size=12, num_attention_heads=6, num_key_value_heads=3
    )
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    other = hw.load(place / "model")
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[:2] *= 9
    other.save_pretrained(place / "other")
    tokenizer.save_pretrained(place / "other")
    (place / "some.txt").write_text("\n".join(LINES), "utf-8")
    answers = [
        {"text": line[:-5], "right": f" {WORDS[3 + n // 4]}", "other": f" {WORDS[11 + n // 4]}"}
        for n, line in enumerate(LINES)  # the same four lines, and other answers to each
    ]
    (place / "answers.jsonl").write_text(_lines(answers), "utf-8")
    examples = [
        {"ids": [1, 3 + n % 5, 6, 3 + n % 7, 3 + n % 4, 4], "query": [5, 6], "right": [1, 3],
         "wrong": [[3, 4], [4, 5]], "answer": [5]}
        for n in range(64)
    ]  # fmt: skip
    (place / "examples.jsonl").write_text(_lines(examples), "utf-8")
    spans = [
        {"text": f"I work {word} works", "words": [[0, 1], [2, 6], [7, 7 + len(word)]],
         "pairs": [[2, 0, "source"]]}
        for word in ("he", "they", "you", "I") * 3
    ]  # fmt: skip
    (place / "spans.jsonl").write_text(_lines(spans), "utf-8")
    return Inputs(place, model, tokenizer)


def _run(at: Inputs, monkeypatch: pytest.MonkeyPatch, line: str) -> tuple[str, str]:
    """What a command prints, and its notes."""
    monkeypatch.chdir(at.place)
    done = headwise(*line.split())
    assert done.code == 0, done.err
    return done.out, done.err


@pytest.mark.parametrize("name", CASES)
def test_what_a_command_writes_is_what_the_library_gives(
    name: str, at: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    out, notes = _run(at, monkeypatch, f"{case.command} --force --json")
    result, expected = case.load(at.place / case.out), case.expected(at)
    pd.testing.assert_frame_equal(result.frame(), expected.frame(), check_dtype=False)
    assert re.search(case.notes, notes), notes
    rows, names = json.loads(out), expected.frame()["name"].tolist()
    assert {row["name"] for row in rows} <= {*names}
    if "--figure" in case.command:
        figure = case.command.split("--figure ")[1].split()[0]
        assert (at.place / figure).read_text("utf-8").startswith("<?xml")
    if "--save-examples" in case.command:
        again = case.command.replace("--task needle", "--examples needles.jsonl").replace(
            " --save-examples needles.jsonl", ""
        )
        assert _run(at, monkeypatch, f"{again} --force --json")[0] == out


# Command lines: what they print, and what they say.
PRINTED = {
    "importance model --text some.txt": (r"^ +importance +ci_low +ci_high\nL", ""),
    "effects model --examples answers.jsonl --total none --max-texts 5": (
        r"^ +direct +ci_low +ci_high", "Of 5 distinct examples no head can be tested for what it"
        " writes: give 20 or more(.|\n)*not tested: 5 distinct examples, 20 needed",
    ),
    "effects model --examples answers.jsonl --total none -o effects.csv --force": (
        r"^ +direct +ci_low +ci_high(.|\n)*L1", "all heads: effects.csv",
    ),
    "report model --text one.txt --no-roles --examples few.jsonl -o few.html --force": (
        "", "Of 3 distinct examples no head can be tested for what it writes: give 20 or more",
    ),
    "heads model --examples examples.jsonl --nulls none --max-texts 20": (
        r"in_set(.|\n)*L\d", "no head was tested: 10 held-out examples(.|\n)*The nearest",
    ),
    "roles model --text one.txt --nulls none -o few.csv --force": (
        "^ +heads +nearest", "0 heads have 0 roles[^\n]*\nAll heads with their evidence: few.csv",
    ),
    "roles model --text one.txt --nulls none": (
        "^none\n(.|\n)*not tested: 1 held-out text, 30 needed",
        "Of 1 text no role of text can be tested(.|\n)*0 heads have 0 roles",
    ),
    "cache model --window 4 --max-texts 2 --max-tokens 40 --bytes 10000": (
        r"L1\.KV1", "bytes=10000 by half-gate of the loss lm",
    ),
    "compare model other --text some.txt": ("heads? differs? on 32 texts(.|\n)*L1\\.H", "32 texts"),
}  # fmt: skip


@pytest.mark.parametrize("line", PRINTED)
def test_without_an_output_results_are_printed(
    line: str, at: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (at.place / "one.txt").write_text("I work\n", "utf-8")
    answers = (at.place / "answers.jsonl").read_text("utf-8").split("\n")
    (at.place / "few.jsonl").write_text("\n".join(answers[:3]), "utf-8")
    out, notes = _run(at, monkeypatch, line)
    printed, said = PRINTED[line]
    assert re.search(printed, out), out
    assert re.search(said, notes), notes


def test_found_roles_are_printed_with_their_outcomes(
    at: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = make_roles(make_study(), with_role=(0, 3))
    monkeypatch.setattr("headwise.roles.find_roles", lambda *_, **__: roles)
    out, notes = _run(at, monkeypatch, "roles model --text some.txt")
    assert f"{roles}\n" in notes
    header, first, second, outcomes, outcome = out.splitlines()
    assert header.split() == ["role", "effect", "baseline", "null", "lift", "p_adj"]
    assert [row.split()[0] for row in (first, second)] == roles.found()["name"].tolist()
    columns = ["heads", "nearest", "effect", "ci_low", "ci_high", "baseline", "smallest", "p_adj",
               "outcome"]  # fmt: skip
    assert outcomes.split() == columns
    assert outcome.split() == [
        *("previous", "token", "2", "L0.H0", "0.875", "0.812", "0.938", "0.25", "0.5", "0.00025"),
        *("found,", "against", "previous", "token"),
    ]


@pytest.mark.full
def test_texts_of_several_files_are_read_together(
    at: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "1\tThe cook sang because she could\tshe\t22\tThe cook\t0\tTRUE\tsang\t9\tFALSE\tu\n"
    (at.place / "gap.tsv").write_text(COLUMNS + row, "utf-8")
    line = "roles model --spans spans.jsonl --coref gap.tsv --nulls none --json"
    out, notes = _run(at, monkeypatch, line)
    assert "source" in {row["role"] for row in json.loads(out)}
    assert "5 distinct texts of 13" in notes


def test_a_set_that_was_not_found_is_not_exported(
    at: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(at.place)
    line = "heads model --examples examples.jsonl --nulls none --vllm-hook hook.json"
    done = headwise(*line.split())
    assert done.code == 2
    assert (
        "--vllm-hook hook.json is for a set that was found, and this one was not found. Give more"
        in done.err
    )
    assert ".export('hook.json', 'vllm-hook', heads=[...])" in done.err
    assert not (at.place / "hook.json").exists()


@pytest.mark.full
def test_a_plan_runs_beside_the_full_cache(at: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.caching._compare._PART", 3)  # of the 4 tokens in the second half
    model = at.model
    plan = hw.cache_plan(model, full={0: [1]}, sinks=1, window=3)
    plan.save(at.place / "small.json")
    text = " ".join(LINES)
    (at.place / "prompt.txt").write_text(text.replace(" ", "\n\n", 3), "utf-8")
    line = "cache model --plan small.json --prompt prompt.txt --max-tokens 8"
    out, notes = _run(at, monkeypatch, line)
    assert "1 of 6 kv heads keeps all tokens" in notes
    header, *rows = out.splitlines()
    assert header.split() == ["loss", "bytes", "tokens_per_second"]
    ids = torch.tensor([at.tokenizer(text)["input_ids"][:8]])
    full = hw.cache_plan(model, full={0: [0, 1, 2], 1: [0, 1, 2]})
    stock = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, cache=stock)
    held = [sum(x.keys.nbytes + x.values.nbytes for x in stock.layers), plan.nbytes(8)]
    names = ("full cache", "this plan")
    for row, name, cached, kept in zip(rows, names, (full, plan), held, strict=True):
        loss, nbytes, speed = row.removeprefix(name).split()
        with torch.no_grad(), cached.cache(model) as cache:
            logits = [model(input_ids=half, cache=cache).logits for half in ids.split(4, dim=1)]
        assert int(nbytes.replace(",", "")) == kept
        expected = F.cross_entropy(torch.cat(logits, 1)[0, 3:-1], ids[0, 4:])
        assert float(loss) == pytest.approx(float(expected), abs=6e-3)
        assert float(speed) > 0


def test_two_tables_are_compared(at: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "other"):
        line = f"observe {name} --text some.txt --per-text -o {name}.parquet --force"
        _run(at, monkeypatch, line)
    out, notes = _run(at, monkeypatch, "compare model.parquet other.parquet --json")
    changed = {row["name"] for row in json.loads(out) if row["outcome"] == "changed"}
    assert "L1.H0" in changed
    assert f"{len(changed)} of 12 heads differ" in notes


# A study from the command line is that of the library, and is drawn, compared and read again.


@pytest.fixture(scope="module")
def study(at: Inputs) -> Study:
    with pytest.MonkeyPatch.context() as patch:
        line = "report model --text some.txt --no-roles --pruning --examples answers.jsonl"
        _, notes = _run(at, patch, f"{line} --save study -o page.html --force")
    assert "The study is saved in study" in notes
    return hw.load_study(at.place / "study")


@pytest.mark.full
def test_a_saved_study_is_drawn_and_compared_again(
    at: Inputs, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(at, monkeypatch, "report --study study -o again.html --force")
    page = (at.place / "page.html").read_bytes()
    assert (at.place / "again.html").read_bytes() == page
    assert b'id="effects"' in page
    assert b'id="pruning"' in page
    out, _ = _run(at, monkeypatch, "compare study study")
    assert "heads differ on 32 texts: no difference is shown." in out


def test_effects_and_pruning_of_a_study_are_those_of_the_library(at: Inputs, study: Study) -> None:
    answers = read_answers(at.place / "answers.jsonl")
    effects = hw.effects(at.model, answers, tokenizer=at.tokenizer)
    assert study.effects is not None
    assert study.effects.frame().equals(effects.frame())
    assert study.scores is not None
    assert study.curves is not None
    expected = hw.importance(at.model, LINES[::2], tokenizer=at.tokenizer)
    assert study.scores.order() == expected.order()
    curves = plan_curves(
        at.model, LINES[1::2], expected, reference=LINES[::2], random=5, tokenizer=at.tokenizer
    )
    assert study.curves.frame().equals(curves.frame())
    heads = curves.elbow("half-gate", curves.allowance(0.01)).heads
    assert heads == (0 if study.plan is None else len(study.plan.removed))


@pytest.mark.parametrize(
    "line", ["[1]", '{"text": "a"}', '{"text": 1, "right": " b"}', '{"text": "a", "right": " b", '
             '"wrong": " c"}', '{"text": "a", "right": " b", "other": 0}']
)  # fmt: skip
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "a", "right": " b"}\n' + line, "utf-8")
    message = r"lines.jsonl, line 2: .* is not an object with the str"
    with pytest.raises(hw.HeadwiseError, match=message):
        read_answers(path)
