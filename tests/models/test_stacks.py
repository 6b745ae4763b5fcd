"""Models of several towers: each is a separate stack with its own text."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from folders import tiny_t5
from headwise.tables import Head, HeadTable
from headwise.watch import observe

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 32}
TEXT = SIZES | {"vocab_size": 23, "max_position_embeddings": 40}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4}
BART = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"vocab_size": 23, "max_position_embeddings": 40, "pad_token_id": 0}

IDS = torch.randint(3, 20, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PATCHES = torch.full((2, 16), 22)  # stand for the image in a text


def _clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE))


def _siglip() -> nn.Module:
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=IMAGE)
    return transformers.SiglipModel(config)


def _llava() -> nn.Module:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**IMAGE),
            text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
            image_token_index=22,
            image_seq_length=16,
        )
    )


def _wav2vec() -> nn.Module:
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            **SIZES, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
            num_feat_extract_layers=2, num_conv_pos_embeddings=4, feat_extract_norm="layer",
            num_conv_pos_embedding_groups=2, do_stable_layer_norm=True,
        )
    )  # fmt: skip


def _bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART, decoder_start_token_id=2, forced_eos_token_id=None)
    )


def _whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **{name: size for name, size in BART.items() if name != "max_position_embeddings"},
            num_mel_bins=8, max_source_positions=15, max_target_positions=20, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )  # fmt: skip


def _two_berts() -> nn.Module:
    decoder = transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderModel(
        encoder=transformers.BertModel(transformers.BertConfig(**TEXT)),
        decoder=transformers.BertLMHeadModel(decoder),
    )


def _gpt2_across() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=4, vocab_size=23, add_cross_attention=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


TEXTS = {"input_ids": IDS, "attention_mask": MASK}
BOTH = TEXTS | {"decoder_input_ids": IDS[:, :4]}
# Model -> its maker, what it reads, and how many queries each of its stacks has in all.
MODELS: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, int]]] = {
    "clip": (_clip, TEXTS | {"pixel_values": PIXELS}, {"text": 12, "vision": 2 * 17}),
    "siglip": (
        _siglip,
        TEXTS | {"pixel_values": PIXELS},
        {"text": 12, "vision": 32, "vision.cross": 2},
    ),
    "llava": (
        _llava,
        {
            "input_ids": torch.cat([PATCHES, IDS], 1),
            "attention_mask": torch.cat([torch.ones_like(PATCHES), MASK], 1),
            "pixel_values": PIXELS,
        },
        {"language": 32 + 12, "vision": 2 * 17},
    ),
    "wav2vec": (
        _wav2vec,
        {
            "input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0)),
            "attention_mask": torch.tensor([[1] * 400, [1] * 200 + [0] * 200]),
        },
        {"": 39 + 19},
    ),
    "t5": (tiny_t5, BOTH, {"encoder": 12, "decoder": 8, "decoder.cross": 8}),
    "bart": (_bart, BOTH, {"encoder": 12, "decoder": 8, "decoder.cross": 8}),
    "whisper": (
        _whisper,
        {
            "input_features": torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(0)),
            "decoder_input_ids": IDS,
        },
        {"encoder": 30, "decoder": 14, "decoder.cross": 14},
    ),
    "two berts": (_two_berts, BOTH, {"encoder": 12, "decoder": 8, "decoder.cross": 8}),
    "gpt2 across": (
        _gpt2_across,
        TEXTS | {"encoder_hidden_states": torch.randn(2, 7, 24)},
        {"": 12, "cross": 12},
    ),
}


def _queries(table: HeadTable) -> dict[str, int]:
    """How many queries were counted in the first layer of each stack."""
    counts = zip(table.heads, table.count("lse"), strict=True)
    return {head.stack: int(n) for head, n in counts if (head.layer, head.head) == (0, 0)}


@pytest.mark.parametrize("name", MODELS)
def test_each_tower_is_a_stack_and_counts_its_own_tokens(name: str) -> None:
    make, batch, expected = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        plain = model(**batch)[0]
        with observe(model) as watch:
            assert torch.equal(model(**batch)[0], plain)
    table = watch.table()
    assert _queries(table) == expected
    assert all(Head.parse(str(head)) == head for head in table.heads)
    assert {head.layer for head in table.heads if "cross" not in head.stack} == {0, 1}


def test_torchs_transformer_has_two_stacks_and_counts_no_padding() -> None:
    model = nn.Transformer(24, 4, 2, 2, 32, batch_first=True).eval()
    padding, asking = MASK == 0, torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]) > 0
    options = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.no_grad(), observe(model) as watch:
        model(torch.randn(2, 7, 24), torch.randn(2, 5, 24), tgt_key_padding_mask=asking, **options)
    assert _queries(watch.table()) == {"encoder": 12, "decoder": 9, "decoder.cross": 9}


def test_names_are_kept_apart_and_short() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer.attn(x, x, x)[0]
            return x

    class Towers(nn.Module):
        def __init__(self, **towers: nn.Module) -> None:
            super().__init__()
            for name, tower in towers.items():
                self.add_module(name, tower)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(tower(x) for tower in self.children())

    nested = Towers(Wav2_model=Tower(), text=Towers(short_tower=Tower(), long_tower=Tower()))
    alike = Towers(text=Tower(), text_model=Tower())
    single = Towers(only=Tower())
    for model, names in (
        (nested, {"wav2", "text.short", "text.long"}),
        (alike, {"text", "text_model"}),
        (single, {""}),
    ):
        with torch.no_grad(), observe(model) as watch:
            model(torch.randn(1, 3, 4))
        assert {site.stack for site in watch.sites()} == names
        assert {site.layer for site in watch.sites()} == {0, 1}
