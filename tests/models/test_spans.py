"""Masses on named stretches of each text are sums of the weights that the model itself returns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import CASES
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel, TemplateProcessing
from torch import Tensor, nn

from folders import word_tokenizer
from headwise.errors import ArgumentError
from headwise.models.texts import token_offsets
from headwise.tables import HeadTable
from headwise.watch import Request, Watch, observe
from oracles import padded

TEXTS = [[5, 9, 7, 3, 11, 4, 6, 8, 2, 13, 12], [8, 10, 3, 3, 12, 9, 5]]
DOC: list[Any] = [(2, 5), [(0, 1), (3, 5)]]  # several stretches of one name
QUERIES: list[Any] = [(6, 9), [(4, 5), (6, 7)]]
STRETCHES = {"doc": DOC, "question": [(1, 2), (2, 6)]}
REQUEST = Request(spans=("doc", "question"), per_text=True, per_query=True)


def _model(name: str) -> nn.Module:
    whole = {"Bart": "BartForConditionalGeneration", "T5": "T5ForConditionalGeneration"}
    return CASES[whole.get(name, name)].make()[0]


def _eager(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """What the model returns with its own weights."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**batch, output_attentions=True)


def _inside(given: Any, n: int) -> Tensor:
    """Which of `n` positions the stretches of one text cover."""
    members = torch.zeros(n)
    for start, end in [given] if isinstance(given, tuple) else given:
        members[start:end] = 1.0
    return members


def _expected(
    maps: Sequence[Tensor], stretches: Sequence[Any], queries: Sequence[Any] | None
) -> np.ndarray:
    """The mean mass on a stretch per head, from the weights `[H, T, S]` of each text alone."""
    sums, count = torch.zeros(maps[0].shape[0], dtype=torch.float64), 0
    for text, weights in enumerate(maps):
        _, T, S = weights.shape
        counted = torch.ones(T) if queries is None else _inside(queries[text], T)
        visible = (weights > 0).any(0)
        keys = _inside(stretches[text], S)
        eligible = counted.bool() & (visible.sum(-1) > 1) & ((visible * keys).sum(-1) > 0)
        sums += (weights.double() @ keys.double())[:, eligible].sum(-1)
        count += int(eligible.sum())
    return (sums / count).numpy()


def _assert_equal(table: HeadTable, stack: str, layer: int, name: str, means: np.ndarray) -> None:
    rows = [row for row, h in enumerate(table.heads) if (h.stack, h.layer) == (stack, layer)]
    np.testing.assert_allclose(table.mean(name)[rows], means, atol=1e-5)


def _watched(
    model: nn.Module, batch: Mapping[str, Any], queries: Any, request: Request = REQUEST
) -> Watch:
    with torch.no_grad(), observe(model, request) as watch:
        watch.spans(**STRETCHES, queries=queries)
        model(**batch)
    return watch


@pytest.mark.parametrize("queries", [None, QUERIES])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_masses_are_sums_of_eager_weights(name: str, side: str, queries: Any) -> None:
    model, batch = _model(name), padded(TEXTS, side)
    watch = _watched(model, batch, queries)
    table = watch.table()
    maps = [_eager(model, {"input_ids": torch.tensor([text])}).attentions for text in TEXTS]
    for layer in range(2):
        of_layer = [text[layer][0] for text in maps]
        for span, stretches in STRETCHES.items():
            _assert_equal(table, "", layer, span, _expected(of_layer, stretches, queries))
    sums = table.per_text("doc")
    for text in range(2):
        one = _expected([maps[text][0][0]], DOC[text : text + 1], queries and queries[text:][:1])
        np.testing.assert_allclose((sums.total / sums.count)[text, :4], one, atol=1e-5)


def test_the_masses_of_single_queries_are_those_of_eager_weights() -> None:
    model = _model("Llama")
    masses = _watched(model, padded(TEXTS, "left"), QUERIES).per_query("doc", "L1.H2")
    for text, ids in enumerate(TEXTS):
        weights = _eager(model, {"input_ids": torch.tensor([ids])}).attentions[1][0, 2]
        known = (weights @ _inside(DOC[text], len(ids)))[_inside(QUERIES[text], len(ids)).bool()]
        torch.testing.assert_close(masses[text], known, atol=1e-5, rtol=0)


def test_a_query_that_sees_no_key_of_a_stretch_is_nan() -> None:
    masses = _watched(_model("Llama"), padded(TEXTS, "right"), None).per_query("doc", "L0.H0")
    assert masses[0].isnan().tolist() == [True] * 2 + [False] * 9
    assert [len(text) for text in masses] == [11, 7]


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_stretches_of_the_source_and_queries_of_the_target(name: str) -> None:
    model, targets = _model(name), [[2, 9, 8, 7], [4, 6]]
    source, target = padded(TEXTS, "right"), padded(targets, "right")
    batch = source | {"decoder_input_ids": target["input_ids"]}
    batch["decoder_attention_mask"] = target["attention_mask"]
    queries = [(1, 3), (0, 2)]
    named, unnamed = (_watched(model, batch, asked).table() for asked in (queries, None))
    outputs = [
        _eager(model, {"input_ids": torch.tensor([x]), "decoder_input_ids": torch.tensor([y])})
        for x, y in zip(TEXTS, targets, strict=True)
    ]
    for layer in range(2):
        cross = [output.cross_attentions[layer][0] for output in outputs]
        encoder = [output.encoder_attentions[layer][0] for output in outputs]
        for span, stretches in STRETCHES.items():
            known = _expected(cross, stretches, queries)
            _assert_equal(named, "decoder.cross", layer, span, known)
            _assert_equal(named, "encoder", layer, span, np.full(4, np.nan))
            _assert_equal(unnamed, "encoder", layer, span, _expected(encoder, stretches, None))
            _assert_equal(unnamed, "decoder", layer, span, np.full(4, np.nan))


def test_packed_texts_are_texts_one_by_one() -> None:
    model = _model("Llama")
    batch = {
        "input_ids": torch.tensor([[token for text in TEXTS for token in text]]),
        "position_ids": torch.cat([torch.arange(len(text)) for text in TEXTS])[None],
        "use_cache": False,
    }
    packed = _watched(model, batch, QUERIES)
    single = _watched(model, padded(TEXTS, "right"), QUERIES)
    for name in ("doc", "question"):
        parts = zip(*(w.table().per_text(name).parts for w in (packed, single)), strict=True)
        for ours, known in parts:
            np.testing.assert_allclose(ours, known, atol=1e-6)
        pairs = zip(packed.per_query(name, (1, 1)), single.per_query(name, (1, 1)), strict=True)
        for ours, known in pairs:
            torch.testing.assert_close(ours, known)


@pytest.mark.parametrize("queries", [None, "generated", [(8, 13), (3, 9)]])
def test_decoding_with_a_cache_counts_like_one_pass(queries: Any) -> None:
    model, new = _model("Llama"), 4
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 1}
    prompt = {key: padded(TEXTS, "left")[key] for key in ("input_ids", "attention_mask")}
    with observe(model, REQUEST) as watch:
        watch.spans(**STRETCHES, queries=queries)
        written = model.generate(**prompt, **how)
    # The last token is written and never read.
    texts = [written[row, -len(text) - new : -1].tolist() for row, text in enumerate(TEXTS)]
    known = [(len(text), len(text) + new - 1) for text in TEXTS]
    same = _watched(
        model, padded(texts, "right"), known if queries == "generated" else queries
    )  # the same texts at once
    for name in STRETCHES:
        parts = zip(*(w.table().per_text(name).parts for w in (watch, same)), strict=True)
        for ours, expected in parts:
            np.testing.assert_allclose(ours, expected, atol=1e-5)
        rows = zip(watch.per_query(name, (1, 0)), same.per_query(name, (1, 0)), strict=True)
        for ours, expected in rows:
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("queries", ["generated", [(1, 3), (2, 4)]])
def test_an_encoder_decoder_that_generates_counts_like_one_pass(queries: Any) -> None:
    model, prompt = _model("Bart"), padded(TEXTS, "right")
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}
    with observe(model, REQUEST) as watch:
        watch.spans(**STRETCHES, queries=queries)
        written = model.generate(**prompt, **how)[:, :-1]
    whole = prompt | {"decoder_input_ids": written}
    same = _watched(model, whole, [(1, 5)] * 2 if queries == "generated" else queries).table()
    rows = [row for row, head in enumerate(same.heads) if head.stack == "decoder.cross"]
    table = watch.table()
    assert [table.heads[row] for row in rows] == [same.heads[row] for row in rows]
    for name in STRETCHES:
        assert (table.count(name)[rows] > 0).all()
        np.testing.assert_array_equal(table.count(name)[rows], same.count(name)[rows])
        np.testing.assert_allclose(table.mean(name)[rows], same.mean(name)[rows], atol=1e-5)


def test_the_last_token_of_each_text_is_its_last_position() -> None:
    model = _model("Llama")
    for side in ("left", "right"):
        batch = padded(TEXTS, side)
        last = _watched(model, batch, "last").table()
        named = _watched(model, batch, [(10, 11), "last"]).table()
        np.testing.assert_array_equal(last.mean("doc"), named.mean("doc"))
        assert last.count("doc").tolist() == [2.0] * 8


def test_a_span_has_every_measure_of_a_class() -> None:
    """Token 3 stands at known places, so the class of it and the stretches agree."""
    model = _model("Llama")
    more: dict[str, Any] = {"top": ("threes", "doc"), "value": ("threes", "doc")}
    for queries in ("eligible", "all"):
        request = Request(classes={"threes": {3}}, spans=("doc",), queries=queries, **more)
        with torch.no_grad(), observe(model, request) as watch:
            watch.spans(doc=[(3, 4), (2, 4)])
            model(**padded(TEXTS, "right"))
        table = watch.table()
        for form in ("{}", "top({})", "value({})"):
            ours, known = (form.format(name) for name in ("doc", "threes"))
            np.testing.assert_array_equal(table.mean(ours), table.mean(known))
            np.testing.assert_array_equal(table.count(ours), table.count(known))


def test_spans_change_no_bit_of_the_output() -> None:
    model, batch = _model("Llama"), padded(TEXTS, "left")
    with torch.no_grad():
        plain = model(**batch).logits
        with observe(model, REQUEST) as watch:
            watch.spans(**STRETCHES)
            watched = model(**batch).logits
    assert torch.equal(plain, watched)


WORDS = ["<unk>", "<s>", "the", "red", "fox", "saw", "blue", "hens", "."]


def _tokenizer() -> Tokenizer:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))]
    )
    return tokenizer


def test_characters_are_the_tokens_that_share_them() -> None:
    tokenizer, model = _tokenizer(), _model("Llama")
    texts = ["the red fox saw blue hens .", "blue hens saw the fox"]
    batch = padded([tokenizer.encode(text).ids for text in texts], "left")
    characters: Any = {"doc": [(4, 11), [(0, 2), (6, 10)]], "queries": [(16, 20), (17, 21)]}
    tokens: Any = {"doc": [(2, 4), [(1, 2), (2, 3)]], "queries": [(5, 6), (5, 6)]}
    by_text = []
    for arguments, given in (((texts, tokenizer), characters), ((), tokens)):
        with torch.no_grad(), observe(model, Request(spans=("doc",), per_text=True)) as watch:
            watch.spans(*arguments, **given)
            model(**batch)
        by_text.append(watch.table().per_text("doc"))
    for ours, known in zip(*(sums.parts for sums in by_text), strict=True):
        np.testing.assert_array_equal(ours, known)


CHINESE = ("北京很大", "那 北京 很大", "a大 北京")
PREPENDS: dict[str, Any] = {
    "Metaspace": {"pre_tokenizer": pre_tokenizers.Metaspace()},
    "Llama": {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    },
    "bytes": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "post_processor": ByteLevel(trim_offsets=False, add_prefix_space=True),
    },
}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", PREPENDS)
def test_a_stretch_begins_with_its_own_characters(kind: str, fast: bool) -> None:
    """A space that the tokenizer puts before a text, or that stands before a word, is not in it."""
    names = ["<unk>", "▁", "▁a", *"a那北京很大", *(f"<0x{n:02X}>" for n in range(256))]
    names += sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"a"})
    ids = {name: n for n, name in enumerate(names)}
    merges = [("▁", "a")]
    tokenizer = Tokenizer(BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    for part, value in PREPENDS[kind].items():
        setattr(tokenizer, part, value)
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer) if fast else tokenizer
    spaces = {"▁", "Ġ"}
    for text, offsets in zip(CHINESE, token_offsets(reader, CHINESE), strict=True):
        tokens = [names[token] for token in offsets.ids]
        for start, end in [(m.start(), m.end()) for m in re.finditer(r"北京|很大|a大|那", text)]:
            inside = [tokens[token] for token in offsets.tokens_in(text, (start, end))]
            assert inside
            assert not spaces & {*inside}
            expected = len(text[start:end].encode()) if kind == "bytes" else end - start
            assert len(inside) == expected
        assert spaces & {*tokens}


def test_a_letter_that_marks_spaces_elsewhere_is_a_letter() -> None:
    (offsets,) = token_offsets(word_tokenizer(["<unk>", "Ġ", "omm"]), ["omm Ġ omm"])
    assert offsets.tokens_in("omm Ġ omm", (4, 5)) == [1]


VISION = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"intermediate_size": 32, "image_size": 12, "patch_size": 4}


@pytest.mark.parametrize(
    "name",
    [
        "ViTModel",
        "ViTForImageClassification",
        "CLIPVisionModel",
        "SiglipVisionModel",
        "Dinov2Model",
    ],
)
@pytest.mark.parametrize("queries", [None, QUERIES])
def test_patches_of_images_are_positions(name: str, queries: list[Any] | None) -> None:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**VISION)).eval()
    batch = {"pixel_values": torch.randn(2, 3, 12, 12)}
    with torch.no_grad(), observe(model, REQUEST) as watch:
        watch.spans(**STRETCHES, queries=queries)
        model(**batch)
    table = watch.table()
    for layer, weights in enumerate(_eager(model, batch).attentions):
        for span, stretches in STRETCHES.items():
            expected = _expected(list(weights), stretches, queries)
            found = table.mean(span)[4 * layer : 4 * layer + 4]
            np.testing.assert_allclose(found, expected, atol=1e-5)
    with torch.no_grad(), observe(model, REQUEST) as watch:
        watch.spans(doc=[(2, 30), (1, 2)], question=[(0, 1), (0, 1)])
        with pytest.raises(ArgumentError, match=r"\(2, 30\) in a text of \d+ tokens"):
            model(**batch)
