"""Models of several towers: each is a separate stack with its own text."""

from typing import Any

import pytest
import torch
import transformers
from architectures import CASES
from architectures.cases import TOKENS
from torch import Tensor, nn

from folders import two_berts
from headwise.tables import Head, HeadTable
from headwise.watch import observe
from oracles import watched

_PAIR = {"encoder": 12, "decoder": 10, "decoder.cross": 10}
# Architecture -> how many queries each of its stacks has in all.
QUERIES = {
    "CLIPModel": {"text": 12, "vision": 2 * 5},
    "SiglipModel": {"text": 12, "vision": 2 * 4, "vision.cross": 2},
    "LlavaForConditionalGeneration": {"language": 8 + 6, "vision": 2 * 5},
    "Wav2Vec2Model": {"": 12 + 6},
    "T5ForConditionalGeneration": _PAIR,
    "BartForConditionalGeneration": _PAIR,
    "WhisperForConditionalGeneration": _PAIR | {"encoder": 2 * 10},
}


def make_towers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of `QUERIES` and its batch, whose second text or sound ends in padding."""
    model, batch = CASES[name].make()
    for read, end in (("input_ids", -2), ("input_values", 200)):
        if read in batch:
            batch["attention_mask"] = torch.ones(batch[read].shape, dtype=torch.long)
            batch["attention_mask"][1, end:] = 0
    return model, batch


def _queries(table: HeadTable) -> dict[str, int]:
    """How many queries were counted in the first layer of each stack."""
    counts = zip(table.heads, table.count("lse"), strict=True)
    return {head.stack: int(n) for head, n in counts if (head.layer, head.head) == (0, 0)}


def _check(model: nn.Module, batch: dict[str, Tensor], queries: dict[str, int]) -> None:
    table = watched(model, **batch).table()
    assert _queries(table) == queries
    assert all(Head.parse(str(head)) == head for head in table.heads)
    assert {head.layer for head in table.heads if "cross" not in head.stack} == {0, 1}


@pytest.mark.parametrize("name", QUERIES)
def test_each_tower_is_a_stack_and_counts_its_own_tokens(name: str) -> None:
    _check(*make_towers(name), QUERIES[name])


def test_models_that_are_given_or_made_of_two_are_stacks() -> None:
    _, batch = make_towers("T5ForConditionalGeneration")
    _check(two_berts(), batch, _PAIR)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 23}
    config = transformers.GPT2Config(**sizes, **TOKENS, add_cross_attention=True)
    del batch["decoder_input_ids"]
    batch["encoder_hidden_states"] = torch.randn(2, 7, 24)
    _check(transformers.GPT2LMHeadModel(config).eval(), batch, {"": 12, "cross": 12})


def test_torchs_transformer_has_two_stacks_and_counts_no_padding() -> None:
    model = nn.Transformer(24, 4, 2, 2, 32, batch_first=True).eval()
    padding = torch.tensor([[0] * 7, [0] * 5 + [1] * 2]) > 0
    asking = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]) > 0
    options = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.no_grad(), observe(model) as watch:
        model(torch.randn(2, 7, 24), torch.randn(2, 5, 24), tgt_key_padding_mask=asking, **options)
    assert _queries(watch.table()) == {"encoder": 12, "decoder": 9, "decoder.cross": 9}


class Towers(nn.ModuleDict):
    """The sum of what its parts make of an input."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(tower(x) for tower in self.children())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": layer}) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["attn"](x, x, x)[0]
        return x


def test_names_are_kept_apart_and_short() -> None:
    text = Towers({"short_tower": Tower(), "long_tower": Tower()})
    for model, names in (
        (Towers({"Wav2_model": Tower(), "text": text}), {"wav2", "text.short", "text.long"}),
        (Towers({"text": Tower(), "text_model": Tower()}), {"text", "text_model"}),
        (Towers({"only": Tower()}), {""}),
    ):
        sites = watched(model, torch.randn(1, 3, 4)).sites()
        assert {site.stack for site in sites} == names
        assert {site.layer for site in sites} == {0, 1}
