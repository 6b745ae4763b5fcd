"""The region of each image token, against paint: which tokens change when a rectangle does."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, UnsupportedError
from headwise.regions import ImageRegions
from tiers import tiers
from vision_families import FAMILIES, Family, idefics2

QUICK = ("LLaVA", "Qwen2.5-VL", "DINOv2 with registers")
SIZES = ((640, 400), (420, 777))


class _Entered(Exception):
    pass


def _noise(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, (*size[::-1], 3), dtype=np.uint8)


def _tokens(model: nn.Module, inputs: Any) -> Tensor:
    """What enters the text decoder, or an encoder's first attention, if all attention gives zero.

    By names, and by forward passes alone: not as `image_regions` does it.
    """
    named = [m for m in model.modules() if "Attention" in type(m).__name__]
    inner = [m for m in named if not any(part in named for part in m.modules() if part is not m)]
    target = model.get_decoder() if "input_ids" in inputs else inner[0]
    entering: list[Tensor] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        values = (kwargs.get("inputs_embeds"), kwargs.get("hidden_states"), *args)
        entering.append(next(x for x in values if x is not None))
        raise _Entered

    def silent(_: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    with ExitStack() as hooks, suppress(_Entered), torch.no_grad():
        hooks.callback(target.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for module in set(inner) - set(target.modules()):
            hooks.callback(module.register_forward_hook(silent).remove)
        model(**inputs)
    return entering[0].flatten(0, -2)


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors resize without a blur."""
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, size, *_, **__: resize(self, size, 0))


def _lawful(
    family: Family, regions: ImageRegions, size: tuple[int, int], paints: int, blur: float = 1
) -> float:
    """The share of painted rectangles that change the tokens whose regions they overlap, and no
    others, within a pixel that the model sees (or the pixels that its processor blurs)."""
    model, process, side = family
    rng, pixels, rows = np.random.default_rng(1), _noise(size), regions.frame()
    box = rows[["left", "top", "right", "bottom"]].to_numpy()
    before = _tokens(model, process([Image.fromarray(pixels)]))
    step = (box[:, 2:] - box[:, :2]) / side
    margin = blur * (step if blur == 1 else np.maximum(step, 1)) + 1
    lawful = 0
    for number in range(paints):
        if number % 2:  # inside one region
            at = rng.integers(len(box))
            low, high = np.ceil(box[at, :2] + margin[at]), box[at, 2:] - margin[at]
            low, high = low.astype(int), np.maximum(high.astype(int), low.astype(int) + 1)
        else:
            low = rng.integers(0, np.array(size) - 20)
            high = np.minimum(size, low + rng.integers(20, np.array(size) // 2))
        painted = pixels.copy()
        part = painted[low[1] : high[1], low[0] : high[0]]
        part[:] = 255 - part
        changed = _tokens(model, process([Image.fromarray(painted)])) != before
        deep = np.minimum(box[:, 2:], high) - np.maximum(box[:, :2], low)
        must = set(rows["position"][(deep > step + 1).all(1)])
        may = set(rows["position"][(deep > -margin).all(1)])
        lawful += must <= set(torch.nonzero(changed.any(-1)).flatten().tolist()) <= may
    return lawful / paints


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("name", QUICK)
def test_paint_changes_the_tokens_whose_regions_it_overlaps(name: str) -> None:
    family = FAMILIES[name]()
    regions = hw.image_regions(*family[:2], [Image.fromarray(_noise(SIZES[0]))])
    assert _lawful(family, regions, SIZES[0], 8) == 1
    assert regions.sizes == SIZES[:1]


# Each family, and one of each kind with a blur: patches of one size, merged ones, tiles.
@pytest.mark.parametrize(
    ("name", "blur", "size"),
    tiers(
        [],
        [
            *product(FAMILIES, [1], SIZES[1:]),
            *product(["LLaVA", "Qwen3-VL", "Idefics3"], [3], SIZES),
        ],
        product(FAMILIES, [1, 3], SIZES),
    ),
)
def test_paint_on_every_family(
    name: str, blur: int, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    if blur == 1:
        request.getfixturevalue("nearest")
    family = FAMILIES[name]()
    regions = hw.image_regions(*family[:2], [Image.fromarray(_noise(size))])
    # Idefics3 resizes twice, by a kernel that reaches far: faintly, it changes more neighbors.
    assert _lawful(family, regions, size, 40, 6 if name == "Idefics3" and blur > 1 else blur) == 1


def _moved(regions: ImageRegions, change: Callable[[Any], Any]) -> ImageRegions:
    sides = ["left", "top", "right", "bottom"]
    box = change(regions.rows[sides].to_numpy())
    return replace(regions, rows=regions.rows.assign(**dict(zip(sides, box.T, strict=True))))


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize(
    "change",
    [
        lambda box: np.roll(box, 1, 0),
        lambda box: box[:, [1, 0, 3, 2]] * [1.6, 0.625, 1.6, 0.625],
        lambda box: np.stack([640 - box[:, 2], box[:, 1], 640 - box[:, 0], box[:, 3]], 1),
        lambda box: box * 1.04,
    ],
    ids=["one token late", "transposed", "mirrored", "4 % too large"],
)
def test_the_law_catches_wrong_maps(change: Callable[[Any], Any]) -> None:
    family = FAMILIES["LLaVA"]()
    regions = hw.image_regions(*family[:2], [Image.fromarray(_noise(SIZES[0]))])
    assert _lawful(family, _moved(regions, change), SIZES[0], 20) < 0.7


def test_tokens_of_several_images_and_frames_name_them() -> None:
    model, process, _ = FAMILIES["LLaVA"]()
    small, large = (Image.fromarray(_noise(size)) for size in ((300, 200), (420, 777)))
    rows = hw.image_regions(model, process, [small, large]).frame()
    assert rows["image"].tolist() == [0] * 64 + [1] * 64
    alone = hw.image_regions(model, process, [large]).frame()
    sides = ["left", "top", "right", "bottom"]
    np.testing.assert_allclose(rows[sides][64:], alone[sides], atol=1e-9)
    video = hw.image_regions(model, lambda images: process(images[0]), [[small, small, small]])
    assert video.frame()["frame"].tolist() == [0] * 64 + [1] * 64 + [2] * 64
    assert video.sizes == ((300, 200),)
    assert video.inside((0, 0, 300, 200), frame=1) == [[(66, 130)]]


def test_positions_do_not_count_padding() -> None:
    model, process, _ = FAMILIES["LLaVA"]()

    def padded(images: list[Any]) -> dict[str, Tensor]:
        inputs = process(images)
        ids, n = inputs["input_ids"][0].tolist(), 3
        rows = torch.tensor([[5, *ids[:66], 7, 7], [1] * n + ids[:66]])
        mask = torch.tensor([[1] * 69, [0] * n + [1] * 66])
        return {**inputs, "input_ids": rows, "attention_mask": mask}

    images = [Image.fromarray(_noise((300, 200)))] * 2
    regions = hw.image_regions(model, padded, images)
    assert regions.n_texts == 2
    assert regions.inside((0, 0, 300, 200)) == [[(3, 67)], []]
    assert regions.inside((0, 0, 300, 200), image=1) == [[], [(2, 66)]]


def test_what_was_measured_is_kept_for_the_same_sizes_and_settings() -> None:
    model, process, _ = FAMILIES["LLaVA"]()
    passes: list[Any] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: passes.append(1))
    image, other = (Image.fromarray(_noise((300, 200), seed)) for seed in (0, 1))
    first = hw.image_regions(model, process, [image])
    seen = len(passes)
    assert hw.image_regions(model, process, [other]) is first
    assert len(passes) == seen > 0
    mirrored = hw.image_regions(
        model, lambda images: process([_mirror(x) for x in images]), [image]
    )
    np.testing.assert_allclose(mirrored.rows["right"], 300 - first.rows["left"], atol=0.6)
    hw.image_regions(model, process, [_mirror(image).crop((0, 0, 299, 200))])
    assert len(passes) > 2 * seen


def _mirror(image: Any) -> Any:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def test_the_tokens_inside_a_box_are_spans() -> None:
    model, process, _ = FAMILIES["LLaVA"]()
    image = Image.fromarray(_noise((640, 400)))
    regions = hw.image_regions(model, process, [image])
    columns = {"text", "position", "image", "left", "top", "right", "bottom", "frame"}
    assert set(regions.frame()) == columns
    box = (200, 0, 330, 80)
    [spans] = regions.inside(box)
    rows = regions.frame()
    middle = rows[["left", "top"]].to_numpy() + 25
    inside = ((middle > box[:2]) & (middle < box[2:])).all(1)
    assert {n for span in spans for n in range(*span)} == set(rows["position"][inside])
    request, inputs = hw.Request(statistics=(), spans=("object",)), process([image])
    with torch.no_grad(), hw.observe(model, request) as watch:
        watch.spans(object=[spans], queries=["last"])
        model(**inputs)
    heads = watch.table().frame().dropna().set_index("name")["object"]
    weights = hw.attentions(model, inputs, queries=-1).language
    mass = weights[1][0, 2, 0, [n for span in spans for n in range(*span)]].sum()
    np.testing.assert_allclose(heads["language.L1.H2"], float(mass), rtol=1e-5)


def _cross(images: list[Any]) -> dict[str, Tensor]:
    values = torch.stack([torch.tensor(np.asarray(x)).float() / 255 for x in images])
    return {"input_ids": torch.tensor([[5, 6, 7]]), "pixel_values": values.flatten(1)[None, :, :96]}


class _CrossReader(nn.Module):
    """Text that reads an image by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.reader = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.see, self.decoder = nn.Linear(8, 8), _Reader()

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        seen = self.see(pixel_values.unflatten(-1, (-1, 8)).flatten(0, 1))
        return self.decoder(self.embed(input_ids), seen)


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        return self.layer(hidden, seen, seen)[0]


def _refused() -> list[Any]:
    torch.manual_seed(0)
    vit, process, _ = FAMILIES["ViT"]()
    noise = [Image.fromarray(_noise((120, 80)))]

    def cropped(images: list[Any]) -> Any:  # to what is not white
        return process([x.crop(Image.fromarray(255 - np.asarray(x)).getbbox()) for x in images])

    def jittered(images: list[Any]) -> Any:
        shift = torch.randint(5, 40, ()).item()
        return process([x.crop((shift, 0, *x.size)) for x in images])

    def varying(images: list[Any]) -> Any:
        return process(images[: 1 + (np.asarray(images[0]).mean() > 200)] * 2)

    page = np.full((80, 120, 3), 255, np.uint8)
    page[20:60, 30:70] = _noise((40, 40))
    return [
        (
            *idefics2()[:2],
            noise,
            UnsupportedError,
            "no token of model.text_model is made of pixels",
        ),
        (_CrossReader(), _cross, noise, UnsupportedError, "_Reader by cross-attention, not as tok"),
        (vit, cropped, [Image.fromarray(page)], UnsupportedError, "pictures by their content"),
        (vit, jittered, noise, UnsupportedError, r"by their content \(\d+\.\d% off\)"),
        (vit, varying, noise * 2, UnsupportedError, "gives 75264 or 150528 numbers"),
        (vit, lambda images: {"x": 1}, noise, ArgumentError, r"returns dict of \['x'\], without"),
        (vit, process, noise[0], ArgumentError, "images=<PIL.Image.*Give a list of PIL images"),
        (vit, process, [_noise((5, 5))], ArgumentError, "Give a list of PIL images"),
    ]


@pytest.mark.parametrize("number", range(8))
def test_what_has_no_regions_is_refused(number: int) -> None:
    model, process, images, error, said = _refused()[number]
    with pytest.raises(error, match=f"(?s)image_regions: .*{said}"):
        hw.image_regions(model, process, images)


def test_regions_of_ones_own_are_checked() -> None:
    rows = hw.image_regions(*FAMILIES["ViT"]()[:2], [Image.fromarray(_noise((120, 80)))]).frame()
    with pytest.raises(ArgumentError, match=r"ImageRegions: rows lack left, frame\. Give"):
        ImageRegions(rows.drop(columns=["left", "frame"]), ((120, 80),))
    regions = ImageRegions(rows, ((120, 80),))
    for arguments, said in (
        ({"box": (0, 0, 130, 80)}, r"box=\(0, 0, 130, 80\) in an image of 120 × 80"),
        ({"box": (50, 0, 50, 80)}, r"box=\(50, 0, 50, 80\)"),
        ({"box": (50, 0, 50)}, r"box=\(50, 0, 50\) .* Give four numbers"),
        ({"box": (0, 0, 9, 9), "image": 1}, "image=1 of 1 images"),
        ({"box": (0, 0, 3, 3)}, r"no token has 50% of its region in \(0, 0, 3, 3\)"),
    ):
        with pytest.raises(ArgumentError, match=f"ImageRegions.inside: {said}"):
            regions.inside(**arguments)
    assert regions.inside((0, 0, 3, 3), share=0.0) == [[(1, 2)]]
