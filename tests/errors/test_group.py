"""Heads that cannot share keys and values are refused with the reason."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
import zoo
from peft import LoraConfig, get_peft_model
from torch import nn

from headwise import MultiHeadAttention, group_heads, prune
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import fingerprint


@pytest.mark.parametrize("n", [0, -1, 3, 4, 8, 2.0, True])
def test_an_impossible_number_of_groups(n: Any) -> None:
    model = _llama()
    before = fingerprint(model)
    message = rf"n_kv_heads={n}, but the model has 4. .* divides it: 1, 2\."
    with pytest.raises(ArgumentError, match=message):
        group_heads(model, n)
    assert fingerprint(model) == before


def test_a_single_head_cannot_be_grouped() -> None:
    with pytest.raises(ArgumentError, match=r"n_kv_heads=1, but .* has 1\..*: there is none"):
        group_heads(_llama(1), 1)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ([], "group_heads: reference holds no batch. Give one or more"),
        (["a text"], "group_heads: reference holds the text 'a text'"),
    ],
)
def test_an_unusable_reference(reference: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        group_heads(_llama(), 2, reference=reference)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "GPTNeoX", "BloomForCausalLM"])
def test_a_configuration_without_kv_heads(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"has no num_key_value_heads or num_kv_heads in"):
        group_heads(zoo.make(name), 2)


def test_a_layer_without_a_configuration() -> None:
    with pytest.raises(UnsupportedError, match="MultiHeadAttention has no num_key_value_heads"):
        group_heads(MultiHeadAttention(12, 4), 2)


def test_heads_pruned_before() -> None:
    small = prune(_llama(), {0: [0, 1]})
    message = r"differs from its configuration \(in model.layers.0.self_attn.q_proj.weight\)"
    with pytest.raises(UnsupportedError, match=message):
        group_heads(small, 2)


def _with_4(config: Any) -> Any:
    config = deepcopy(config)
    config.num_key_value_heads = 4
    return config


class _Always4(transformers.LlamaForCausalLM):
    """Attention with 4 kv heads whatever its configuration says."""

    def __init__(self, config: Any) -> None:
        super().__init__(_with_4(config))
        self.config = config


def test_attention_that_ignores_the_number_of_kv_heads() -> None:
    message = "model.layers.0.self_attn has 4 kv heads where the configuration says 2"
    with pytest.raises(UnsupportedError, match=message):
        group_heads(_llama(4, _Always4), 2)


def test_latent_attention() -> None:
    with pytest.raises(UnsupportedError, match=r"the keys of the heads of model.layers.0.self_at"):
        group_heads(zoo.make("DeepseekV3"), 2)


def test_a_norm_over_all_heads() -> None:
    with pytest.raises(UnsupportedError, match=r"the queries of the heads of model.layers.0.self"):
        group_heads(zoo.make("Olmo2"), 1)


def test_norms_of_each_kv_head() -> None:
    message = r"self_attn.k_norm.weight holds numbers for each of 2 kv heads"
    with pytest.raises(UnsupportedError, match=message):
        group_heads(zoo.make("Cohere"), 1)


def test_attention_implemented_by_hand() -> None:
    config = transformers.FalconConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=4,
        vocab_size=23, new_decoder_architecture=True, alibi=True, attn_implementation="eager",
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"the queries of .*h.0.self_attention cannot be"):
        group_heads(transformers.FalconForCausalLM(config).eval(), 2)


class _Biased(transformers.LlamaForCausalLM):
    """Attention with a different position bias for each head."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])
        back = (positions[:, None] - positions).float()  # T T
        bias = torch.where(back < 0, -torch.inf, -back)
        slopes = torch.tensor([0.0, 0.5, 1.0, 2.0])[:, None, None]
        bias = torch.where(back < 0, bias, slopes * bias)[None]
        return super().forward(input_ids=input_ids, attention_mask=bias)


@torch.no_grad()
def test_positions_that_depend_on_heads() -> None:
    model = _llama(4, _Biased)
    for layer in model.model.layers:  # the first head and the third are alike
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = part.weight.view(4, 6, 24)
            heads[2] = heads[0]
    message = "in another order the output of _Biased would be off by .* such as position biases"
    with pytest.raises(UnsupportedError, match=message):
        group_heads(model, 2)


class _Counting(transformers.LlamaForCausalLM):
    """Attention whose forward pass assumes 4 kv heads."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.model.layers[1].self_attn.k_proj.weight.view(4, 6, 24)
        return super().forward(input_ids=input_ids)


def test_a_model_that_depends_on_its_kv_heads() -> None:
    message = "_Counting does not run with 2 kv heads .shape '.4, 6, 24.' is invalid"
    with pytest.raises(UnsupportedError, match=message):
        group_heads(_llama(4, _Counting), 2)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters() -> None:
    adapted = get_peft_model(_llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"group_heads: .* holds adapters. Call merge_and"):
        group_heads(adapted, 2)


def test_packed_weights() -> None:
    model = _llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(
        UnsupportedError, match=r"group_heads: .*q_proj.weight is Tensor of torch.i"
    ):
        group_heads(model, 2)


def _llama(n_kv_heads: int = 4, cls: Any = transformers.LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    return cls(
        transformers.LlamaConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=13,
            intermediate_size=16, max_position_embeddings=16, num_key_value_heads=n_kv_heads,
        )
    ).eval()  # fmt: skip
