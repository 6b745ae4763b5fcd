"""Plans and models that cannot be pruned are refused, and the model is unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from headwise import MultiHeadAttention, Plan, prune
from headwise.errors import (
    ArgumentError,
    HeadError,
    InputError,
    OutputError,
    ShapeError,
    UnsupportedError,
)
from headwise.models import fingerprint
from headwise.surgery import LayerPlan
from headwise.tables import Head

HEADS = [Head("", layer, head) for layer in range(2) for head in range(3)]


def _llama(heads: int = 3) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=heads, vocab_size=13,
            intermediate_size=16, max_position_embeddings=16, num_key_value_heads=heads,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ({0: [3]}, r"no head \(0, 3\)"),
        ({2: [0]}, r"no head \(2, 0\)"),
        (["L0.H1", (0, 1)], "L0.H1 is named twice"),
        ({1: [0, 1, 2]}, "L1.H2 is the last head of its layer"),
    ],
)
def test_heads_that_cannot_be_removed(remove: Any, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        Plan.of(remove, HEADS)
    model = _llama()
    before = fingerprint(model)
    with pytest.raises(HeadError, match=message):
        prune(model, remove)
    assert fingerprint(model) == before


def test_a_layer_that_removes_missing_heads() -> None:
    with pytest.raises(HeadError, match=r"no head L4.H7.*has 3 heads"):
        LayerPlan("", 4, 3, (7,))
    with pytest.raises(HeadError, match=r"L4\.H1 is named twice"):
        LayerPlan("", 4, 3, (1, 1))


def test_a_plan_for_another_model() -> None:
    plan = Plan.of({0: [1]}, HEADS, model="0123456789abcdef")
    with pytest.raises(ArgumentError, match="for the model 0123456789abcdef"):
        prune(_llama(), plan)


def test_a_plan_for_other_sizes() -> None:
    with pytest.raises(ArgumentError, match=r"layers of \[3, 3\] heads.*has \[6, 6\]"):
        prune(_llama(6), Plan.of({0: [1]}, HEADS))


def test_an_unknown_fold() -> None:
    with pytest.raises(ArgumentError, match="fold='median'"):
        prune(_llama(), {0: [1]}, fold="median")  # type: ignore[arg-type]


def test_a_fold_of_nothing() -> None:
    with pytest.raises(ArgumentError, match="without a reference"):
        prune(_llama(), {0: [1]}, fold="mean")


def test_one_bias_for_the_means_of_several_layers() -> None:
    config = transformers.AlbertConfig(
        hidden_size=12, num_attention_heads=3, num_hidden_layers=2, vocab_size=13,
        intermediate_size=16, embedding_size=8, max_position_embeddings=16,
    )  # fmt: skip
    reference = [{"input_ids": torch.tensor([[3, 5, 7]])}]
    with pytest.raises(UnsupportedError, match="one bias for all"):
        prune(transformers.AlbertModel(config), [(0, 1), (1, 1)], fold="mean", reference=reference)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters() -> None:
    adapted = get_peft_model(_llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"holds adapters. Call merge_and_unload\(\)"):
        prune(adapted, {0: [1]})


def test_packed_weights() -> None:
    layer = MultiHeadAttention(12, 4)
    layer.q_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight is Tensor of torch.int8"):
        prune(layer, (0, 1))


def test_sharded_weights() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = MultiHeadAttention(12, 4)
        mesh = init_device_mesh("cpu", (1,))
        layer.q_proj.weight = nn.Parameter(distribute_tensor(layer.q_proj.weight.detach(), mesh))
        with pytest.raises(UnsupportedError, match=r"q_proj.weight is DTensor.*Gather sharded"):
            prune(layer, (0, 1))
    finally:
        distributed.destroy_process_group()


def test_a_further_key_of_torch_s_layer() -> None:
    layer = nn.MultiheadAttention(12, 4, add_bias_kv=True, batch_first=True)
    with pytest.raises(UnsupportedError, match="add_bias_kv or add_zero_attn attends to a key"):
        prune(layer, (0, 1))


def test_masks_of_another_number_of_heads() -> None:
    small, x = prune(nn.MultiheadAttention(12, 4, batch_first=True), (0, 1)), torch.randn(2, 5, 12)
    with pytest.raises(ShapeError, match=r"\(6, 5, 5\) .* multiple of the 4 heads .* had"):
        small(x, x, x, attn_mask=torch.zeros(6, 5, 5))


class _Scaled(nn.Module):
    """A layer that divides by the total number of features of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).flatten(2)) / q.shape[1]


def test_a_cut_that_would_change_the_output() -> None:
    x = torch.randn(2, 5, 12)
    with pytest.raises(
        UnsupportedError, match="output of _Scaled without these heads would be off by"
    ):
        prune(_Scaled(), (0, 1), reference=[x])


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(InputError, match=r"plan.json holds no plan"):
        Plan.load(path)
    for text in ("{", "[]", '{"format": "other/1"}', '{"format": "headwise-plan/1"}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"plan.json holds no plan"):
            Plan.load(path)
    layer = '{"stack": "", "layer": 0, "n_heads": 3, "remove": ["1"]}'
    path.write_text(f'{{"format": "headwise-plan/1", "layers": [{layer}], "model": "", "why": ""}}')
    many = layer.replace("3", "2147483648").replace('"1"', "1")  # a grid of them takes gigabytes
    path.write_text(f'{{"format": "headwise-plan/1", "layers": [{many}], "model": "", "why": ""}}')
    with pytest.raises(InputError, match="2147483648 heads in layer 0; from 1 to 65536 are read"):
        Plan.load(path)
    path.write_text(f'{{"format": "headwise-plan/1", "layers": [{layer}], "model": "", "why": ""}}')
    with pytest.raises(InputError, match="'1' is not a whole number"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": []}, "it has no layer"),
        ({"model": None}, "None is not a text"),
        ({"why": 3}, "3 is not a text"),
        ({"costs": {"seconds": [1, "2"]}}, "'2' is not a finite number"),
        ({"costs": {"seconds": [True, 2]}}, "True is not a finite number"),
        ({"costs": {"seconds": [-1, 2]}}, r"its costs 'seconds' are \[-1, 2\]"),
        ({"costs": {"seconds": [float("nan"), 2]}}, "nan is not a finite number"),
        ({"layers": [{"stack": 1, "layer": 0, "n_heads": 3, "remove": []}]}, "1 is not a text"),
        ({"layers": [{"stack": "", "layer": 0, "n_heads": 3, "remove": ""}]}, "'' is not a list"),
        ({"layers": [{"stack": "", "layer": 0, "n_heads": 0, "remove": []}]}, "0 heads in layer 0"),
        ({"layers": [{"stack": "", "layer": -1, "n_heads": 3, "remove": []}]}, "in layer -1"),
    ],
)
def test_a_plan_with_a_wrong_value(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason").save(tmp_path / "plan.json")
    assert Plan.load(path).removed
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=rf"plan.json holds no plan \(.*{says}"):
        Plan.load(path)


def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        Plan.of({0: [1]}, HEADS).save(tmp_path / "nowhere" / "plan.json")
