"""Encoder-decoders read pairs of texts: in a study, on its page, and from the command line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from architectures import CASES
from tokenizers.processors import TemplateProcessing
from torch import nn

from command import headwise
from folders import two_berts, word_tokenizer
from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.models.texts import as_pieces, decoder_ids, inputs_of
from headwise.report import study
from headwise.report.page import render
from headwise.report.page._payload import payload
from headwise.roles import find_roles
from headwise.scoring import importance
from headwise.tables import HeadTable
from headwise.watch import attentions, links, observe
from tiers import tiers

WORDS = ["<pad>", "</s>", "<unk>", "<s>", *"abcdefghij", ",", "."]
TEXTS = ["a b c d", "e , f g h i j .", "a", "b d f h j a c e g i"]
TARGETS = ["c d", "a b c d e f", "g h i", "j ."]
STACKS = ["encoder", "decoder", "decoder.cross"]


MODELS = {
    "T5": "T5ForConditionalGeneration", "BART": "BartForConditionalGeneration",
    "Marian": "MarianMTModel", "mBART": "MBartForConditionalGeneration",
    "M2M100": "M2M100ForConditionalGeneration", "two BERTs": "",
}  # fmt: skip
BARE = {"T5": "T5Model", "BART": "BartModel"}  # which take no labels


def _make(name: str, bare: bool = False) -> nn.Module:
    model = CASES[MODELS[name]].make()[0] if MODELS[name] else two_berts()
    return getattr(transformers, BARE[name])(model.config).eval() if bare else model.eval()


def _tokenizer(longest: int = 40) -> Any:
    words = word_tokenizer(WORDS, "<unk>")
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        bos_token="<s>", model_max_length=longest,
    )  # fmt: skip


def _ids(text: str) -> list[int]:
    return [*(WORDS.index(word) for word in text.split()), 1]


def _count(table: HeadTable, stack: str, name: str = "lse") -> int:
    rows = [row for row, head in enumerate(table.heads) if head.stack == stack]
    counts = table.count(name)[rows]
    assert (counts == counts[0]).all()
    return int(counts[0])


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces")
@pytest.mark.parametrize("name", MODELS)
def test_decoder_inputs_equal_those_the_model_makes_from_labels(name: str) -> None:
    model, labels = _make(name), _ids("c d e")
    read: list[list[int]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        read.append(ids[0].tolist())

    model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([_ids("a b")]), labels=torch.tensor([labels]))
    assert decoder_ids(model, labels) == read[0]
    assert len(read[0]) == len(labels)


@pytest.mark.parametrize("name", BARE)
def test_a_model_without_a_head_shifts_like_the_one_with_it(name: str) -> None:
    labels = _ids("c d e")
    assert decoder_ids(_make(name, bare=True), labels) == decoder_ids(_make(name), labels)


# An encoder-decoder that is one model, and one that is made of two.
_FEW = ("T5", "two BERTs")


@pytest.mark.parametrize("name", tiers(_FEW, MODELS))
def test_a_study_of_pairs_is_that_of_each_pair_alone(name: str) -> None:
    model, tokenizer = _make(name), _tokenizer()
    table = study(model, TEXTS, tokenizer=tokenizer, targets=TARGETS).table
    with torch.no_grad(), observe(model) as watch:
        for text, target in zip(TEXTS, TARGETS, strict=True):
            decoder = decoder_ids(model, _ids(target))
            model(
                input_ids=torch.tensor([_ids(text)]),
                attention_mask=torch.ones(1, len(_ids(text)), dtype=torch.int64),
                decoder_input_ids=torch.tensor([decoder]),
            )
    alone = watch.table()
    assert table.heads == alone.heads
    assert {head.stack for head in table.heads} == set(STACKS)
    for statistic in alone.statistics:
        for of in ("mean", "count"):
            pair = [getattr(source, of)(statistic) for source in (table, alone)]
            np.testing.assert_allclose(*pair, atol=2e-5, rtol=2e-4, err_msg=statistic)
    sources = sum(len(_ids(text)) for text in TEXTS)
    targets = sum(len(_ids(text)) for text in TARGETS)
    assert [_count(table, stack) for stack in STACKS] == [sources, targets, targets]


def test_without_targets_each_text_is_its_own() -> None:
    model, tokenizer = _make("T5"), _tokenizer()
    alone, named = (
        study(model, TEXTS, tokenizer=tokenizer, targets=targets) for targets in (None, TEXTS)
    )
    for statistic in alone.table.statistics:
        np.testing.assert_array_equal(alone.table.mean(statistic), named.table.mean(statistic))
    assert alone.text["targets"] == "the texts themselves"
    assert named.text["targets"] == "separate texts"
    assert (
        alone.text["tokens of targets"] == alone.text["tokens"] == sum(map(len, map(_ids, TEXTS)))
    )


def test_a_long_text_that_is_its_own_target_is_cut_like_any_other() -> None:
    result = study(_make("T5"), "a b c d e f g h i j", tokenizer=_tokenizer(), max_tokens=6)
    assert (result.text["texts"], result.text["pieces of texts"]) == (1, 2)
    assert result.findings()[0].startswith("Shares of attention not tested: 1 text, 5 needed")


def test_every_kind_of_map_has_its_own_tokens() -> None:
    model, tokenizer = _make("BART"), _tokenizer()
    result = study(model, TEXTS[:1], tokenizer=tokenizer, targets=TARGETS[:1])
    (sample,) = result.samples
    source, target = ["a", "b", "c", "d", "</s>"], ["<unk>", "c", "d"]
    assert (list(sample.tokens), list(sample.targets)) == (source, target)
    for head, weights in sample.weights.items():
        sides = [len(sample.side(side)) for side in sample.sides(head)]
        assert weights.shape == (sides[0], sides[1])
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    (shown,) = payload(result)["samples"]
    assert all(data is not None for data in shown["maps"])
    views = {stack: shown["views"][view] for stack, view in shown["view"].items()}
    texts = {"source": shown["tokens"], "target": shown["targets"]}
    sides = {stack: tuple(texts[side] for side in entry["sides"]) for stack, entry in views.items()}
    assert sides == {
        "encoder": (source, source),
        "decoder": (target, target),
        "decoder.cross": (target, source),
    }
    assert views["decoder"]["cells"] == ["1..", "++.", "+++"]
    assert views["decoder.cross"]["cells"] == ["+" * 5] * 3
    assert render(result).count("decoder.cross.L0.H0")


def test_classes_of_keys_come_from_the_attended_text() -> None:
    result = study(_make("T5"), ["a , b"], tokenizer=_tokenizer(), targets=["c d"])
    table = result.table
    # The text ends with a special token; the decoder's own begins with one.
    assert [_count(table, stack, "special") for stack in STACKS] == [4, 2, 3]
    assert _count(table, "decoder.cross", "punctuation") == 3
    assert np.isnan(table.mean("punctuation")[[h.stack == "decoder" for h in table.heads]]).all()


def test_importance_takes_texts_as_their_own_targets() -> None:
    model, tokenizer = _make("T5"), _tokenizer()
    scores = importance(model, TEXTS, tokenizer=tokenizer)
    pieces = as_pieces(tokenizer, [(text, text) for text in TEXTS], model)
    batches = list(inputs_of(pieces, 16, labels=True))
    np.testing.assert_allclose(scores.per_text, importance(model, batches).per_text, rtol=1e-5)
    assert scores.loss == "label"
    bare = importance(_make("T5", bare=True), TEXTS, tokenizer=tokenizer)
    assert bare.loss == "embedding"


def test_pairs_that_do_not_fit_are_refused() -> None:
    model, tokenizer = _make("T5"), _tokenizer()
    with pytest.raises(ArgumentError, match="study: 4 texts and 3 targets"):
        study(model, TEXTS, tokenizer=tokenizer, targets=TARGETS[:3])
    with pytest.raises(
        InputError, match=r"pair 1 does not fit into 6 tokens .* 2 pieces, its target 2"
    ):
        study(model, TEXTS[:2], tokenizer=tokenizer, targets=TARGETS[:2], max_tokens=6)
    gpt = zoo.make("GPT2")
    with pytest.raises(ArgumentError, match=r"targets are for .* GPT2LMHeadModel reads one text"):
        study(gpt, TEXTS, tokenizer=tokenizer, targets=TARGETS)


def test_a_decoder_without_a_start_token_is_refused() -> None:
    model = _make("T5")
    model.config.decoder_start_token_id = model.config.pad_token_id = None
    with pytest.raises(ArgumentError, match=r"T5ForCond.* does not say how its decoder begins"):
        study(model, TEXTS, tokenizer=_tokenizer())

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    with pytest.raises(UnsupportedError, match="Other has no function that shifts labels"):
        decoder_ids(Other(), [1, 2])


OTHERS = {
    "WhisperForConditionalGeneration": "reads input_features, not text",
    "ViTModel": "reads pixel_values, not text",
    "CLIPModel": "reads pixel_values beside text, and does not run on text alone",
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_speech_and_images_are_refused(name: str) -> None:
    said, tokenizer = f"{name} {OTHERS[name]}", _tokenizer()
    model, _ = CASES[name].make()
    doors: dict[str, Callable[[], Any]] = {
        "study": lambda: study(model, TEXTS, tokenizer=tokenizer),
        "find_roles": lambda: find_roles(model, TEXTS, tokenizer=tokenizer),
        "(batches|heads)": lambda: importance(model, TEXTS, tokenizer=tokenizer),
        "links": lambda: links(model, "a b c", "c", "a", tokenizer=tokenizer),
        "attentions": lambda: attentions(model, "a b c", tokenizer=tokenizer),
    }
    for door, call in doors.items():
        with pytest.raises(UnsupportedError, match=f"{door}: {said}"):
            call()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, texts and targets."""
    place = tmp_path_factory.mktemp("encoder-decoder")
    _make("T5").save_pretrained(place)
    _tokenizer().save_pretrained(place)
    (place / "texts.txt").write_text("\n".join(TEXTS) + "\n", "utf-8")
    (place / "targets.txt").write_text("\n".join(TARGETS) + "\n", "utf-8")
    (place / "fewer.txt").write_text("\n".join(TARGETS[:3]) + "\n", "utf-8")
    (place / "gap.txt").write_text("a\n\nb\nc\n", "utf-8")
    return place


@pytest.mark.full
def test_a_t5_folder_without_a_start_token_begins_with_padding(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(place, folder, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config.pop("decoder_start_token_id") == config["pad_token_id"] == 0
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tables = []
    for name in (place, folder):
        tables.append(tmp_path / f"{name.name}.csv")
        done = headwise("observe", name, "--text", place / "texts.txt", "-o", tables[-1])
        assert done.code == 0, done.err
    assert tables[0].read_text("utf-8") == tables[1].read_text("utf-8")
    done = headwise("report", folder, "--text", place / "texts.txt", "-o", tmp_path / "page.html")
    assert done.code == 0, done.err


def _data(page: Path) -> dict[str, Any]:
    html = page.read_text("utf-8")
    start = html.index('id="data">') + len('id="data">')
    return json.loads(html[start : html.index("</script>", start)])


@pytest.mark.parametrize("target", [pytest.param(None, marks=pytest.mark.full), "targets.txt"])
def test_the_report_and_the_table_of_pairs(place: Path, tmp_path: Path, target: str | None) -> None:
    more = () if target is None else ("--target", place / target)
    page, table = tmp_path / "page.html", tmp_path / "table.parquet"
    done = headwise("report", place, "--text", place / "texts.txt", "-o", page, *more)
    assert done.code == 0, done.err
    assert "Roles are not looked for: T5ForConditionalGeneration reads two texts" in done.err
    assert set(_data(page)["stacks"]) == set(STACKS)
    done = headwise("observe", place, "--text", place / "texts.txt", "-o", table, *more)
    assert done.code == 0, done.err
    read = TEXTS if target is None else TARGETS
    assert _count(HeadTable.load(table), "decoder.cross") == sum(map(len, map(_ids, read)))


@pytest.mark.parametrize("command", ["report", "observe"])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--target", "fewer.txt"), r"texts.txt has 4 lines, and .*fewer.txt has 3"),
        (("--target", "gap.txt"), r"gap.txt, line 2: the line is empty"),
        (("--target", "none.txt"), r"read_parallel: .*none.txt cannot be read"),
    ],
)
def test_targets_that_do_not_fit(
    place: Path, tmp_path: Path, command: str, more: tuple[str, str], said: str
) -> None:
    out = tmp_path / ("page.html" if command == "report" else "table.csv")
    target = (more[0], place / more[1])
    done = headwise(command, place, "--text", place / "texts.txt", "-o", out, *target)
    assert done.code == 2

    assert re.search(said, done.err), done.err
    assert not out.exists()


def test_requested_roles_are_refused(place: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = headwise("report", place, "--text", place / "texts.txt", "-o", page, "--roles")
    assert done.code == 2
    assert "T5ForConditionalGeneration reads two texts, and a relation is of one" in done.err
