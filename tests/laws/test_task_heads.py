"""Task heads: a planted head is found, a model without it has none, and files hold the evidence."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import headwise as hw
from headwise.roles import FoundHeads, find_heads, load_heads, task_examples
from headwise.roles.evidence._nulls import permuted
from headwise.roles.examples._task_scores import (
    TokenExample,
    best_set,
    hits,
    margins,
    positional_hits,
    with_set,
)
from planted import CONTEXT, IDS, TOKENIZER, WORDS, PlantedGPT

KEYS, VALUES = WORDS[:20], WORDS[20:]
LAYERS = (["even", "before", "even", "even"], ["even", "even", "induction", "even"])
RETRIEVAL = "L1.H2"
ALONE = re.compile(r"alone in: L1\.H2 100\.0% found \(p = \S+\), L0\.H1 .*% not found \(lift")


def retrieval(n: int, seed: int = 0, as_text: bool = False) -> list[hw.Example]:
    """Six keys, each with its value, then one key again; its statement is the right stretch."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(n):
        keys, values = rng.choice(KEYS, 6, replace=False), rng.choice(VALUES, 6, replace=False)
        asked = int(rng.integers(6))
        words = [word for pair in zip(keys, values, strict=True) for word in pair]
        text = " ".join([*words, keys[asked]])
        places = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        if as_text:
            spans = [(places[2 * i], places[2 * i + 2] - 1) for i in range(6)]
            query, source = (len(text) - len(keys[asked]), len(text)), text
            examples.append(_example(source, query, spans, asked, str(values[asked])))
            continue
        ids = TOKENIZER.encode(text).ids
        first = len(ids) - 13  # after a token that begins the text
        spans = [(first + 2 * i, first + 2 * i + 2) for i in range(6)]
        answer = [IDS[values[asked]]]
        examples.append(_example(ids, (len(ids) - 1, len(ids)), spans, asked, answer))
    return examples


def _example(
    text: str | Sequence[int],
    query: tuple[int, int],
    spans: list[tuple[int, int]],
    asked: int,
    answer: str | Sequence[int],
) -> hw.Example:
    wrong = [span for number, span in enumerate(spans) if number != asked]
    return hw.Example(text, query, [spans[asked]], wrong, answer)


@pytest.fixture(scope="module")
def found() -> FoundHeads:
    return find_heads(PlantedGPT(LAYERS).eval(), retrieval(90), evidence=hw.Evidence(models=1))


def test_a_planted_head_is_found_and_no_other(found: FoundHeads) -> None:
    rows = found.found()
    assert rows["name"].tolist() == [RETRIEVAL] == [str(head) for head in found.heads]
    assert rows["effect"][0] == found.set_row["effect"] == 1.0
    assert found.set_row["found"]
    assert found.set_row["outcome"] == "found"
    others = found.frame()[found.frame()["name"] != RETRIEVAL]
    assert set(others["outcome"]) == {"not found"}
    # Each says why, and what the planted head is compared with does not depend on the hopeless.
    assert (others["p_adj"] == 1).all()
    assert (
        others["why"]
        .str.fullmatch(r"lift -?[\d.]+ on the selection half, 0.125 needed for a test")
        .all()
    )
    assert rows["why"][0] == ""
    assert rows["p_adj"][0] < 1e-4
    assert (others["effect"] < 0.5).all()
    assert found.frame()["null.chance"].round(6).eq(round(1 / 6, 6)).all()


def test_ablating_the_set_takes_the_answer_away(found: FoundHeads) -> None:
    effect = found.answers
    assert effect is not None
    assert effect.n == 45
    assert effect.accuracy == 1.0
    assert effect.accuracy_without < 0.4
    assert effect.ci_low > effect.loss_random - effect.loss


@pytest.mark.parametrize(
    ("heads", "family", "outcome"),
    [
        (RETRIEVAL, "1 head named beforehand", {RETRIEVAL: "found"}),
        ([(0, 1)], "1 head named beforehand", {"L0.H1": "not found"}),
        (["L0.H1", RETRIEVAL], "2 heads named beforehand",
         {"L0.H1": "not found", RETRIEVAL: "found"}),
    ],
)  # fmt: skip
def test_heads_named_beforehand_are_the_set_and_the_family(
    found: FoundHeads, heads: Any, family: str, outcome: dict[str, str], tmp_path: Path
) -> None:
    evidence, model = hw.Evidence(models=1), PlantedGPT(LAYERS).eval()
    named = find_heads(model, retrieval(90), heads=heads, evidence=evidence)
    assert f"p adjusted over {family} and the set" in named.notes
    assert "p adjusted over 8 heads and the set" in found.notes
    rows, every = (x.frame().set_index("name") for x in (named, found))
    assert rows["outcome"].to_dict() == outcome
    assert [str(head) for head in named.heads] == [*outcome]
    columns = ["effect", "baseline", "lift", "ci_low", "ci_high", "n", "contrast"]
    assert rows[columns].equals(every.loc[rows.index, columns])
    assert (rows["p_adj"] <= every.loc[rows.index, "p_adj"]).all()
    assert load_heads(named.save(tmp_path / "heads.json")).frame().equals(named.frame())


def test_characters_find_the_same_as_tokens(found: FoundHeads) -> None:
    by_text = find_heads(
        PlantedGPT(LAYERS).eval(),
        retrieval(90, as_text=True),
        tokenizer=TOKENIZER,
        evidence=hw.Evidence(nulls=()),
    )
    assert by_text.texts == found.texts
    assert by_text.frame()["effect"].equals(found.frame()["effect"])
    assert by_text.answers == found.answers


def test_a_model_that_learned_nothing_has_none() -> None:
    control = permuted(PlantedGPT(LAYERS), seed=7)
    assert control is not None
    none = find_heads(control.eval(), retrieval(90), evidence=hw.Evidence(models=1))
    assert not len(none.found())
    assert not none.set_row["found"]
    assert none.set_row["outcome"] == "not found"
    assert none.set_row["why"] in str(none)
    assert none.set_row["why"]
    with pytest.raises(hw.errors.ArgumentError, match=r"the set was not found \(lift -?\d"):
        none.export("heads.json", "vllm-hook", model_name="a/b")


@pytest.mark.parametrize("task", ["needle", "passage"])
def test_generated_examples_find_the_planted_head_alone(task: str) -> None:
    """The same examples find nothing in the same weights in another order."""
    examples = task_examples(task, tokenizer=TOKENIZER, n=64, n_tokens=CONTEXT)
    evidence, model = hw.Evidence(nulls=("exchanged",)), PlantedGPT(LAYERS).eval()
    rows = find_heads(model, examples, tokenizer=TOKENIZER, evidence=evidence).found()
    assert rows["name"].tolist() == [RETRIEVAL]
    control = permuted(PlantedGPT(LAYERS), seed=7)
    assert control is not None
    evidence = hw.Evidence(nulls=())
    none = find_heads(control.eval(), examples, tokenizer=TOKENIZER, evidence=evidence)
    assert not len(none.found())
    assert not none.set_row["found"]


STORY = [
    f"{one} {two} saw {three} today."
    for one, two, three in zip(WORDS[10:20], WORDS[20:30], WORDS[30:40], strict=True)
]


@pytest.mark.parametrize("texts", [None, STORY * 2], ids=["vocabulary", "texts"])
@pytest.mark.parametrize("task", ["needle", "passage", "instruction"])
def test_the_question_alone_decides_and_every_place_is_right_equally_often(
    task: str, texts: Sequence[str] | None
) -> None:
    examples = task_examples(task, texts, tokenizer=TOKENIZER, n=24, n_tokens=CONTEXT)
    assert examples == task_examples(task, texts, tokenizer=TOKENIZER, n=24, n_tokens=CONTEXT)
    assert examples != task_examples(
        task, texts, tokenizer=TOKENIZER, n=24, n_tokens=CONTEXT, seed=1
    )
    places = []
    for one, other in zip(examples[::2], examples[1::2], strict=True):
        assert one.right != other.right or task == "instruction"
        for example in (one, other):
            text, [right], wrong = str(example.text), example.right, list(example.wrong)
            places.append(sorted([right, *wrong]).index(right) == 0)
            assert len(TOKENIZER.encode(text).ids) + bool(example.answer) <= CONTEXT
            assert example.query[1] == len(text)
            if task == "needle":
                key, _, value, _ = text[slice(*right)].split()
                assert text.endswith(f" {key} :")
                assert value == example.answer
        first, second = str(one.text), str(other.text)
        if task != "instruction":
            assert first[: one.query[0]] == second[: other.query[0]]
        else:  # what is injected into one is the instruction of the other
            injected = [second[slice(*span)] for span in other.wrong]
            assert first[slice(*one.right[0])] in injected
    assert places.count(True) == (12 if task == "instruction" else 6)


@pytest.mark.parametrize(("task", "texts", "more", "message"), [
    ("nedle", None, {}, "no task 'nedle'. Choose from needle, passage, instruction."),
    ("needle", None, {"tokenizer": None}, "tokenizer=None. Give one"),
    ("needle", None, {"tokenizer": "gpt2"}, "tokenizer='gpt2' is a str. Open it"),
    ("needle", None,
     {"tokenizer": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))},
     "the vocabulary has 0 whole words of three letters or more, and examples need 12. Give"),
    ("needle", None, {"n": 0}, "n=0, n_tokens=256. Give 1"),
    ("needle", None, {"n_tokens": 9}, "no example of needle fits n_tokens=9. Give more."),
    ("passage", STORY[:4], {}, "4 sentences of three words or more, and 13 different words"),
])  # fmt: skip
def test_examples_that_cannot_be_made(
    task: str, texts: Sequence[str] | None, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(hw.errors.ArgumentError, match=message.replace(".", r"\.")):
        task_examples(task, **{"tokenizer": TOKENIZER, "texts": texts} | more)


def test_stretches_that_are_written_alike_are_no_baseline_for_each_other() -> None:
    """Which of several equal words follows the key: an exchange leaves the text as it is."""
    examples = []
    for example in retrieval(90):
        ids = np.array(example.text)
        wrong = [(end - 1, end) for _, end in example.wrong]
        (right,) = [(end - 1, end) for _, end in example.right]
        ids[[start for start, _ in (right, *wrong)]] = IDS[VALUES[0]]
        examples.append(hw.Example(ids.tolist(), example.query, [right], wrong))
    evidence = hw.Evidence(nulls=("exchanged",))
    found = find_heads(PlantedGPT(LAYERS).eval(), examples, evidence=evidence)
    assert found.found()["name"].tolist() == [RETRIEVAL]
    assert "the stretches of each example are written alike: none were exchanged" in found.notes


def _other_order(example: hw.Example) -> hw.Example:
    return replace(example, wrong=list(example.wrong)[::-1], answer=())


def test_few_examples_test_nothing_however_often_they_are_given() -> None:
    """A copy is no evidence, in whatever order its stretches are and whatever its answer is."""
    few = retrieval(40)
    once, copied = (
        find_heads(PlantedGPT(LAYERS).eval(), given, evidence=hw.Evidence(nulls=()))
        for given in (few, [*few, *map(_other_order, few), *few])
    )
    assert once.set_row["outcome"] == "not tested: 20 held-out texts, 30 needed"
    assert set(once.frame()["outcome"]) == {once.set_row["outcome"]}
    assert any("no head was tested" in note for note in once.notes)
    assert {f"nulls that were left out: {n}" for n in ("exchanged", "permuted, random")} < {
        *once.notes
    }
    assert once.notes[0].startswith("40 distinct examples of 40; the set")
    assert copied.notes[0].startswith("40 distinct examples of 120; the set")
    assert copied.notes[1:] == once.notes[1:]
    assert copied.frame().equals(once.frame())
    assert (copied.texts, copied.answers) == (once.texts, once.answers)


def test_other_images_make_other_examples() -> None:
    images = {
        name: TokenExample((1,), (), (), 0, (), {"pixel_values": torch.full((1, 2), value)})
        for name, value in (("one", 1.0), ("copy", 1.0), ("other", 2.0))
    }
    questions = {name: example.question() for name, example in images.items()}
    assert questions["one"] == questions["copy"] != questions["other"]


def test_a_head_that_looks_at_a_place_is_no_task_head() -> None:
    """The right stretch is always the last: any head that looks there decides correctly."""
    examples = [
        hw.Example(e.text, e.query, [(11, 13)], [(s, s + 2) for s in range(1, 11, 2)])
        for e in retrieval(90)
    ]
    layers = (["even", "before", "even", "even"], ["even", "even", "induction", "even"])
    table = find_heads(PlantedGPT(layers).eval(), examples, evidence=hw.Evidence(nulls=()))
    assert not table.frame()["found"].any()
    assert table.set_row["null"] == "the last"
    assert table.set_row["baseline"] == 1.0


def _masses(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The masses of 9 heads on up to 4 stretches of 40 examples, of which the first is right."""
    rng = np.random.default_rng(seed)
    exists = rng.random((40, 4)) < 0.8
    exists[:, :2] = True
    right = np.zeros_like(exists)
    right[:, 0] = True
    return np.where(exists[..., None], rng.random((40, 4, 9)), -np.inf), right


def test_hits_are_ties_shared() -> None:
    masses, right = _masses(0)
    for m in range(40):
        for head in range(9):
            shown = [mass for mass in masses[m, :, head] if mass >= 0]
            assert hits(masses, right)[m, head] == float(shown[0] == max(shown))
            margin = shown[0] - max(shown[1:])
            assert margins(masses, right)[m, head] == pytest.approx(margin)
    exists = masses >= 0
    np.testing.assert_allclose(hits(np.where(exists, 1.0, -np.inf), right), 1 / exists.sum(1))


@pytest.mark.parametrize("seed", range(5))
def test_a_set_never_decides_worse_than_its_best_head(seed: int) -> None:
    (masses, right), selection = _masses(seed), np.arange(40) < 25
    best = hits(masses, right)[selection].mean(0)
    alone = best_set(masses, right, selection, 1)
    several = best_set(masses, right, selection, 5)
    assert len(alone) == 1
    assert 1 <= len(several) <= 5
    assert best[alone[0]] == best.max()
    accuracy = [
        hits(with_set(masses, several[:n]), right)[selection, -1].mean() for n in (1, len(several))
    ]
    assert accuracy[-1] >= accuracy[0] == best.max()
    # What happens on the other half does not matter.
    changed = np.where(selection[:, None, None], masses, 0.0)
    assert best_set(changed, right, selection, 5) == several


@pytest.mark.parametrize(("gained", "size"), [(1, 1), (3, 1), (4, 2), (9, 2)])
def test_a_head_joins_a_set_for_more_than_noise(gained: int, size: int) -> None:
    """The first head errs in nine of 118 examples; the second is right in some, else undecided."""
    masses = np.full((118, 2, 2), 0.1)
    masses[:, 0, 0], masses[:9, 0, 0], masses[:gained, 0, 1] = 0.2, 0.0, 0.9
    right = np.tile([True, False], (118, 1))
    assert best_set(masses, right, np.ones(118, bool), 2) == [0, 1][:size]


def test_positional_rules() -> None:
    example = TokenExample(tuple(range(20)), ((10, 12),), ((7, 9), (0, 4), (14, 15)), 1, ())
    assert positional_hits([example]).tolist() == [[0.0, 0.0, 1.0, 0.0]]
    tied = TokenExample(tuple(range(9)), ((8, 9),), ((0, 2), (2, 4)), 1, ())
    assert positional_hits([tied]).tolist() == [[1.0, 0.0, 0.0, 0.5]]


def test_exchanged_stretches_keep_all_tokens_and_the_rest_of_the_text() -> None:
    example = TokenExample(tuple(range(20)), ((18, 20),), ((1, 4), (6, 9), (12, 13)), 1, ())
    ids = example.exchanged(np.random.default_rng(0)).ids
    places = [1, 2, 3, 6, 7, 8, 12]
    assert ids != example.ids
    assert sorted(ids) == list(range(20))
    assert [ids[i] for i in range(20) if i not in places] == [
        i for i in range(20) if i not in places
    ]


def test_a_saved_file_loads_equal(found: FoundHeads, tmp_path: Path) -> None:
    path = found.save(tmp_path / "heads.json")
    loaded = load_heads(path, PlantedGPT(LAYERS))
    assert loaded.frame().equals(found.frame())
    for name in ("heads", "answers", "notes", "texts", "queries", "model", "name", "versions"):
        assert getattr(loaded, name) == getattr(found, name)
    assert {k: v for k, v in loaded.set_row.items() if v == v} == {
        k: v for k, v in found.set_row.items() if v == v
    }
    assert (loaded.save(tmp_path / "again.json")).read_bytes() == path.read_bytes()
    with pytest.raises(hw.errors.ArgumentError, match="holds heads of the model"):
        load_heads(path, PlantedGPT((LAYERS[0], ["even", "induction", "even", "even"])))


@pytest.mark.parametrize(
    ("known", "name"),
    [("owner/model", "owner/model"), ("/no/such/folder", "folder"), (".", Path.cwd().name),
     (None, "")],
)  # fmt: skip
def test_a_file_says_no_place_on_a_machine(known: str | None, name: str, tmp_path: Path) -> None:
    model = PlantedGPT(LAYERS).eval()
    model.config._name_or_path = known
    few = find_heads(model, retrieval(2), evidence=hw.Evidence(nulls=()))
    assert few.name == name
    assert "/no/such" not in few.save(tmp_path / "heads.json").read_text()


def test_the_form_that_vllm_hook_reads(found: FoundHeads, tmp_path: Path) -> None:
    path = found.export(tmp_path / "a.json", "vllm-hook", model_name="owner/model-1b")
    config = json.loads(path.read_text())
    # As `HookLLM.load_config` of vLLM-Hook reads it.
    layer_to_heads: dict[int, list[int]] = {}
    for layer, head in config["params"]["important_heads"]:
        layer_to_heads.setdefault(layer, []).append(head)
    assert layer_to_heads == {1: [2]}
    assert config["hookq"]["hookq_mode"] == "last_token"
    assert config["model_info"]["model_id"] == "owner/model-1b"
    # What else is known of the heads goes with them: what was not asked, the seed, the examples.
    for line in str(found).split("\n")[1:]:
        assert line in config["model_info"]["note"] or line == str(found.answers)


def test_a_set_shows_what_each_of_its_heads_does_alone(found: FoundHeads, tmp_path: Path) -> None:
    of_two = replace(found, heads=tuple(map(hw.Head.parse, (RETRIEVAL, "L0.H1"))))
    path = of_two.export(tmp_path / "a.yaml", "qrhead", model_name="owner/model-1b")
    for shown in (str(of_two), path.read_text().splitlines()[0]):
        assert "the set L1.H2, L0.H1 is right in 100.0% of" in shown
        assert ALONE.search(shown)
    assert "alone" not in str(found)


def test_the_form_that_qrhead_reads(found: FoundHeads, tmp_path: Path) -> None:
    heads = ["L1.H2", "L0.H1"]
    path = found.export(tmp_path / "a.yaml", "qrhead", model_name="owner/model-1b", heads=heads)
    config = yaml.safe_load(path.read_text())
    # As `AttnBasedRetriever` of QRHead reads it.
    pairs = [tuple(map(int, head.split("-"))) for head in config["attn_head_set"].split(",")]
    assert pairs == [(1, 2), (0, 1)]
    assert config["model_base_class"].lower() == "model-1b"
    assert config["model_name_or_path"] == "owner/model-1b"
    note = path.read_text().splitlines()[0]
    assert note.startswith(
        f"# headwise {found.versions['headwise']}, model {found.model}: the user's own"
    )
    assert ALONE.search(note)
    assert note.endswith("; ".join(found.notes))


def test_the_result_is_readable(found: FoundHeads) -> None:
    assert "is right in 100.0% of 45 held-out cases" in str(found)
    assert f"model {found.model}, examples {str(found.texts['sha256'])[:16]}, seed 0" in str(found)
    assert repr(found).startswith(f"FoundHeads: {found}\n")  # line by line
    assert RETRIEVAL in repr(found)
    assert "<table" in found._repr_html_()
    assert torch.is_grad_enabled()
