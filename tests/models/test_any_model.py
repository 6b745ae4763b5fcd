"""Models that no short input can be made up for, that draw at random, or keep statistics."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import CASES
from architectures.cases import Inputs
from architectures.trial import answer_in_this_process
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from headwise.checkpoints import _save
from headwise.errors import ArgumentError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from tiers import tiers

pytestmark = pytest.mark.usefixtures("fresh")

# A made-up input of these does not run, or there is none.
UNKNOWN = ("VivitModel",)
_ALSO = (
    "LlavaForConditionalGeneration",
    "BlipForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "VideoMAEModel",
    "MoonshineForConditionalGeneration",
)
# Sounds are made up.
SOUNDS = ("Wav2Vec2Model", "Data2VecAudioModel", "SpeechT5ForSpeechToText")

Verb = Callable[[nn.Module, Path, list[Inputs] | None], Any]


def _ablate(model: nn.Module, folder: Path, reference: list[Inputs] | None, **how: Any) -> Any:
    with hw.ablate(model, _first(model), reference=reference, **how) as ablation:
        return ablation.heads


def _first(model: nn.Module) -> str:
    return FIRST.get(type(model).__name__, "L0.H0")


FIRST = {
    "BlipForConditionalGeneration": "vision.L0.H0",
    "LlavaForConditionalGeneration": "vision.L0.H0",
    "PaliGemmaForConditionalGeneration": "vision.L0.H0",
    "MoonshineForConditionalGeneration": "encoder.L0.H0",
    "SpeechT5ForSpeechToText": "encoder.L0.H0",
}
# It reads images by the width of all heads.
UNCUT = {"BlipForConditionalGeneration"}
VERBS: dict[str, Verb] = {
    "ablate": _ablate,
    "prune": lambda model, _, reference: hw.prune(model, _first(model), reference=reference),
    "costs": lambda model, _, reference: hw.costs(model, reference),
    "save": lambda model, folder, reference: hw.save(model, folder / "x", reference=reference),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SOUNDS)
def test_an_input_is_made_up_for_models_of_sounds(name: str, tmp_path: Path) -> None:
    model, batch = CASES[name].make()
    assert _ablate(model, tmp_path, None) == _ablate(model, tmp_path, [batch])


@pytest.mark.parametrize("name", tiers(UNKNOWN, _ALSO))
def test_what_cannot_be_made_up_is_taken_as_a_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_save, "answer_in_fresh_process", answer_in_this_process)
    model, batch = CASES[name].make()
    for verb, call in VERBS.items():
        with pytest.raises(ArgumentError, match=r"heads: .* Give reference=\[batch\], so that it"):
            call(model, tmp_path, None)
        if verb == "prune" and name in UNCUT:
            with pytest.raises(UnsupportedError, match=name):
                call(model, tmp_path, [batch])
            continue
        assert call(model, tmp_path, [batch]), verb
    assert _ablate(model, tmp_path, [batch], mode="mean")


@pytest.mark.full  # each is opened by a fresh process
@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "SiglipModel"])
def test_a_pruned_model_of_images_and_text_is_loaded_equal(name: str, tmp_path: Path) -> None:
    model, batch = CASES[name].make()
    small = hw.prune(model, "vision.L0.H0", reference=[batch])
    hw.save(small, tmp_path / "small", reference=[batch])
    loaded = hw.load(tmp_path / "small")
    with torch.no_grad():
        outs, known = (one(**batch).to_tuple() for one in (loaded, small))
        full = model(**batch)[0]
    pairs = [pair for pair in zip(outs, known, strict=True) if isinstance(pair[0], Tensor)]
    assert pairs
    assert all(torch.equal(out, expected) for out, expected in pairs)
    assert not torch.equal(pairs[0][0], full)


def test_an_error_of_a_made_up_input_names_it() -> None:
    model, _ = CASES["VivitModel"].make()
    message = r"VivitModel does not run on a made-up input of pixel_values \(ValueError: not enoug"
    with pytest.raises(ArgumentError, match=message):
        hw.costs(model)


@pytest.mark.parametrize("verb", VERBS)
def test_a_reference_holds_batches(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_save, "answer_in_fresh_process", answer_in_this_process)
    model = MiniGPT(MiniGPTConfig(13, 8, 12, 4))
    with pytest.raises(ArgumentError, match=f"{verb}: reference holds no batch. Give one or more"):
        VERBS[verb](model, tmp_path, [])
    with pytest.raises(ArgumentError, match=f"{verb}: reference holds the text 'a text'"):
        VERBS[verb](model, tmp_path, ["a text"])  # type: ignore[list-item]
    wrong: Any
    for wrong in (b"a", [None]):
        with pytest.raises(ArgumentError, match=f"{verb}: reference holds (b'a'|None). Give batch"):
            VERBS[verb](model, tmp_path, wrong)
    with pytest.raises(ArgumentError, match="costs: reference holds 3"):
        hw.costs(model, 3)
    assert VERBS[verb](model, tmp_path, [(torch.tensor([[1, 5, 3]]),)])


def test_a_saved_model_is_compared_on_tensors(tmp_path: Path) -> None:
    inputs = {"input_ids": torch.tensor([[1, 5, 3]]), "causal": True}
    with pytest.raises(ArgumentError, match=r"save: the input causal is a bool. Give a reference"):
        hw.save(MiniGPT(MiniGPTConfig(13, 8, 12, 4)), tmp_path / "x", reference=[inputs])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["ViTMAEForPreTraining", "ViltModel"])
def test_models_that_draw_at_random_are_cut(name: str) -> None:
    model, batch = CASES[name].make()
    heads = ["L0.H1"] if name == "ViltModel" else ["vit.L0.H1", "decoder.L0.H2"]
    draws = torch.get_rng_state()
    small = hw.prune(model, heads, reference=[batch])
    assert torch.equal(torch.get_rng_state(), draws)
    outputs = []
    with torch.no_grad():
        with hw.ablate(model, heads, reference=[batch]):
            outputs.append(_seeded(model, batch))
        outputs += [_seeded(small, batch), _seeded(model, batch)]
    torch.testing.assert_close(outputs[1], outputs[0])
    assert not torch.allclose(outputs[2], outputs[0])


def _seeded(model: nn.Module, batch: Inputs) -> Tensor:
    torch.manual_seed(5)
    output = model(**batch)
    return output.get("logits", output[0])


class AnyAttention(nn.Module):
    """Shaped as attention in timm: one projection of queries, keys and values, and `attn_dim`."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda _: nn.Identity()) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = 4, 3, 12
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm = norm(36)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        qkv = self.norm(self.qkv(x).mT).mT
        q, k, v = qkv.reshape(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).reshape(B, T, self.attn_dim))


class AttendsLikeDiffusers(nn.Module):
    """Shaped as attention in diffusers: `heads`, and a list around the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner_dim, self.sliceable_head_dim = 4, 12, 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(12, 12) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(12, 12), nn.Dropout(0.0)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        head_dim = k.shape[-1] // self.heads
        q, k, v = (y.view(len(x), -1, self.heads, head_dim).transpose(1, 2) for y in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v)
        joined = heads.transpose(1, 2).reshape(len(x), -1, self.heads * head_dim)
        return self.to_out[1](self.to_out[0](joined))


def _with_statistics(norm: nn.Module) -> nn.Module:
    for x in norm.buffers():
        if x.is_floating_point():
            x.uniform_(0.5, 2.0)
    return norm


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "timm": AnyAttention,
    "diffusers": AttendsLikeDiffusers,
    "batch norm": lambda: AnyAttention(lambda n: _with_statistics(nn.BatchNorm1d(n))),
    "batch norm without weights": lambda: AnyAttention(
        lambda n: _with_statistics(nn.BatchNorm1d(n, affine=False))
    ),
}


@pytest.mark.parametrize("kind", ["timm", "diffusers", "batch norm"])
def test_blocks_of_other_libraries_are_cut(kind: str) -> None:
    torch.manual_seed(0)
    model, x = BLOCKS[kind]().eval().double(), torch.randn(2, 5, 12, dtype=torch.float64)
    small = hw.prune(model, ["L0.H1", "L0.H2"], reference=[x])
    with hw.ablate(model, ["L0.H1", "L0.H2"], reference=[x]):
        expected = model(x)
    torch.testing.assert_close(small(x), expected)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    if kind == "batch norm":
        assert len(small.norm.running_mean) == small.norm.num_features == 18


def test_statistics_that_no_weight_leads_to_are_refused() -> None:
    model = BLOCKS["batch norm without weights"]().eval()
    with pytest.raises(
        UnsupportedError, match="prune: without these heads AnyAttention does not run"
    ):
        hw.prune(model, "L0.H1", reference=[torch.randn(2, 5, 12)])


@pytest.mark.parametrize(
    "name", tiers(["PatchTSTModel"], ["MobileViTModel", "Wav2Vec2ConformerModel", "CvtModel"])
)
def test_models_with_batch_norms_are_cut(name: str) -> None:
    model, batch = CASES[name].make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            _with_statistics(module)
    small = hw.prune(model, "L0.H1", reference=[batch])
    with torch.no_grad(), hw.ablate(model, "L0.H1", reference=[batch]):
        expected = model(**batch)[0]
    torch.testing.assert_close(small(**batch)[0], expected)


class Undecided(AnyAttention):
    """Draws where torch does not know of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_a_model_with_two_answers_is_said_to_have_them() -> None:
    x = torch.randn(2, 5, 12)
    message = r"prune: Undecided is not deterministic: the same input gives two different outputs"
    with pytest.raises(UnsupportedError, match=message):
        hw.prune(Undecided().eval(), "L0.H1", reference=[x])


@pytest.mark.parametrize("name", tiers(["zeros"], ["DetrForObjectDetection"]))
def test_rows_that_read_zeros_belong_to_the_heads_of_their_biases(name: str) -> None:
    model, batch = AnyAttention().eval(), {"x": torch.zeros(2, 5, 12)}
    head = "L0.H1"
    if name != "zeros":
        model, batch = CASES[name].make()
        head = "decoder.L0.H1"
    small = hw.prune(model, head, reference=[batch])
    with torch.no_grad(), hw.ablate(model, head, reference=[batch]):
        expected = model(**batch)
    expected = expected if name == "zeros" else expected.logits
    actual = small(**batch)
    torch.testing.assert_close(actual if name == "zeros" else actual.logits, expected)


def test_heads_without_gradients_are_refused() -> None:
    class Frozen(AnyAttention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    message = r"heads: the model runs without gradients, as under torch"
    with pytest.raises(UnsupportedError, match=message):
        hw.prune(Frozen().eval(), "L0.H1", reference=[torch.randn(2, 5, 12)])


@torch.inference_mode()
def test_verbs_work_under_inference_mode() -> None:
    with torch.inference_mode(False):
        model, batch = CASES["ViTModel"].make()
    images = [{"pixel_values": batch["pixel_values"].clone()}]  # an inference tensor
    small = hw.prune(model, "L0.H1", reference=images)
    assert not any(x.is_inference() for x in small.state_dict().values())
    with hw.ablate(model, "L0.H1", reference=images):
        torch.testing.assert_close(small(**batch)[0], model(**batch)[0])
    assert str(hw.costs(model, images)) != str(hw.costs(small, images))
    scores = hw.importance(model, images)
    assert (scores.importance > 0).all()


def test_weights_made_under_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        layer = hw.MultiHeadAttention(8, 2)
    message = r"gradients: \S+ was made under torch.inference_mode\(\), so that no gradient can"
    x = [{"query": torch.randn(1, 5, 8)}]
    with pytest.raises(UnsupportedError, match=message):
        hw.importance(layer, x, loss=lambda output, batch: output.square().mean((1, 2)))
    with pytest.raises(UnsupportedError, match=message):
        hw.costs(layer, x)


def test_prophetnet_has_the_statistics_of_its_main_stream() -> None:
    model, batch = CASES["ProphetNetForConditionalGeneration"].make()
    with torch.no_grad(), hw.observe(model) as watch:
        output = model(**batch, output_attentions=True)
    table = watch.table()
    own = {"encoder": output.encoder_attentions, "decoder": output.decoder_attentions}
    for stack, maps in own.items():
        for layer, weights in enumerate(maps):
            # The encoder returns its logits.
            p = weights.double().softmax(-1) if stack == "encoder" else weights.double()
            # Rows with a single key are counted apart: the first one of a decoder.
            first = 1 if stack == "decoder" else 0
            entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)[..., first:].mean((0, 2))
            rows = [table.row(f"{stack}.L{layer}.H{head}") for head in range(4)]
            np.testing.assert_allclose(table.mean("entropy")[rows], entropy, rtol=1e-4)
    refused = [site for site in watch.sites() if site.reason.startswith("attends among")]
    assert [site.name for site in refused] == [
        f"prophetnet.decoder.layers.{layer}.self_attn" for layer in range(2)
    ]
    assert refused[0].reason == "attends among 5 positions where it was given 15 tokens"


@pytest.mark.parametrize("name", tiers(["SiglipModel"], ["Siglip2VisionModel"]))
def test_a_layer_of_torch_in_a_saved_model_keeps_its_heads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_save, "answer_in_fresh_process", answer_in_this_process)
    model, batch = CASES[name].make()
    with torch.no_grad(), hw.observe(model) as watch:
        model(**batch)
    site = next(site for site in watch.sites() if site.name.endswith("head.attention"))
    gone = [head for head in site.heads() if head.head in (0, 2)]
    small = hw.prune(hw.prune(model, gone[:1], reference=[batch]), gone[:1], reference=[batch])
    hw.save(small, tmp_path / "small", reference=[batch])
    loaded = hw.load(tmp_path / "small")
    torch.testing.assert_close(
        loaded(**batch).pooler_output if name != "SiglipModel" else loaded(**batch).image_embeds,
        small(**batch).pooler_output if name != "SiglipModel" else small(**batch).image_embeds,
    )
    layer = loaded.get_submodule(site.name)
    assert (layer.heads, layer.all_heads) == ([2, 3], 4)
    for form in ("stock", "padded", "remote-code"):
        with pytest.raises(UnsupportedError, match=r"save: .*head.attention replaces a layer of t"):
            hw.save(small, tmp_path / form, format=form, reference=[batch])
