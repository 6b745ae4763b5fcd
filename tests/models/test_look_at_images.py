"""A look at images: the weights are the model's own, the command opens a folder, encoders too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn

import headwise as hw
from command import headwise
from headwise.errors import ArgumentError
from headwise.regions import ImageRegions
from vision_families import FAMILIES, TEXT, VISION

PROMPT = "<image> what is this"
WORDS = ["<pad>", "<image>", "what", "is", "this"]


def _picture(size: tuple[int, int] = (300, 200)) -> Any:
    pixels = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _llava() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT),
        image_token_id=1, vision_feature_layer=-1,
    )  # fmt: skip
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size=112)
    processor = hf.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config).eval(), processor


def _data(page: str) -> dict[str, Any]:
    start = page.index('id="data">') + len('id="data">')
    data: dict[str, Any] = json.loads(page[start : page.index("</script>", start)])
    return data


def test_the_page_has_the_weights_of_words_on_regions(tmp_path: Path) -> None:
    model, processor = _llava()
    look = hw.look(model, PROMPT, tokenizer=processor, images=[_picture()])
    inputs = processor(images=[_picture()], text=PROMPT, return_tensors="pt")
    exact = hw.attentions(model, inputs).language
    for layer, weights in enumerate(exact):
        for head in range(4):
            rows = look.sample.weights[hw.Head("language", layer, head)]
            np.testing.assert_allclose(rows, weights[0, head, 64:].numpy(), atol=1e-6)
    assert look.sample.tokens[-3:] == ("what", "is", "this")
    assert "8 heads of LlavaForConditionalGeneration, on 67 tokens and 1 image." in repr(look)
    page = look.save(tmp_path / "look.html").read_text("utf-8")
    data = _data(page)
    assert data["queries"] == [64, 65, 66]
    assert len(data["regions"]) == 64
    assert len(data["maps"]) == 8
    assert len(data["means"]) == 2
    assert data["pictures"][0]["width"] == 300
    assert data["sinks"] == []
    assert len(page) < 200_000


@pytest.mark.parametrize("name", ["DINOv2 with registers", "SigLIP", "CLIP", "ViT"])
def test_an_encoder_looks_from_patch_to_patches(name: str, tmp_path: Path) -> None:
    model, process, _ = FAMILIES[name]()
    look = hw.look(model, None, tokenizer=process, images=[_picture()])
    n_tokens = len(look.sample.tokens)
    assert list(look.queries) == list(range(n_tokens))
    assert n_tokens - len(look.regions.rows) == {"SigLIP": 0, "DINOv2 with registers": 5}.get(
        name, 1
    )
    data = _data(look.save(tmp_path / "look.html").read_text("utf-8"))
    assert data["tokens"][0] == "token 0"


def test_the_regions_may_be_given_and_one_text_is_read() -> None:
    model, processor = _llava()
    look = hw.look(model, PROMPT, tokenizer=processor, images=[_picture()])
    half = ImageRegions(look.regions.rows[:32], look.regions.sizes, 1, "language")
    again = hw.look(model, PROMPT, tokenizer=processor, images=[_picture()], regions=half)
    assert len(again.queries) == 35
    vit, process, _ = FAMILIES["ViT"]()
    with pytest.raises(ArgumentError, match="look: 2 texts, or images that the model reads one"):
        hw.look(vit, None, tokenizer=process, images=[_picture()] * 2)
    with pytest.raises(ArgumentError, match="look: images= with the processor None"):
        hw.look(vit, None, images=[_picture()])
    for unread in ({"images": [_picture()], "target": "what"}, {"regions": half}):
        with pytest.raises(ArgumentError, match=r"look: (target= with|regions= without) images="):
            hw.look(model, PROMPT, tokenizer=processor, **unread)
    away = ImageRegions(look.regions.rows, look.regions.sizes, 1, "nowhere")
    with pytest.raises(NotImplementedError, match="no attention among the tokens of 'nowhere'"):
        hw.look(model, PROMPT, tokenizer=processor, images=[_picture()], regions=away)


def test_many_pictures_are_smaller_on_the_page() -> None:
    model, processor = _llava()
    look = hw.look(model, PROMPT, tokenizer=processor, images=[_picture((900, 900))])
    rows = pd.concat([look.regions.rows.assign(frame=n) for n in range(8)])
    regions = replace(look.regions, rows=rows)
    video = replace(look, regions=regions, images=[look.images * 8])
    assert len(look._page()) * 4 > len(video._page()) < 5_000_000


def test_the_command_reads_image_files(tmp_path: Path) -> None:
    model, processor = _llava()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    _picture().save(tmp_path / "picture.png")
    arguments = ("look", tmp_path / "model", "what is this", "--image", tmp_path / "picture.png")
    out = tmp_path / "look.html"
    done = headwise(*arguments, "-o", out)
    assert done.code == 0, done.err
    assert _data(out.read_text("utf-8"))["tokens"][-3:] == ["what", "is", "this"]
    refused = headwise(*arguments, "-o", tmp_path / "b.html", "--from", "what", "--to", "is")
    assert (refused.code, "with --from" in refused.err) == (2, True)
    (tmp_path / "text.png").write_text("no image")
    refused = headwise(*arguments[:3], "--image", tmp_path / "text.png", "-o", tmp_path / "b.html")
    assert "text.png cannot be read as an image" in refused.err
    (tmp_path / "model" / "processor_config.json").unlink()
    (tmp_path / "model" / "preprocessor_config.json").unlink(missing_ok=True)
    refused = headwise(*arguments, "-o", tmp_path / "b.html")
    assert "load_processor" in refused.err
