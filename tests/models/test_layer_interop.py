"""Our layer with the weights of transformers gives the output of their attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwise.layer import (
    LayerOutput,
    LinearScaling,
    Llama3Scaling,
    MultiHeadAttention,
    RoPE,
    Scaling,
    T5Bias,
    YaRN,
)

B, T, S = 2, 7, 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


class CapturedModule:
    """The inputs and outputs of a module during a pass of the whole model."""

    def __init__(self, module: nn.Module) -> None:
        module.register_forward_hook(self._hear, with_kwargs=True)

    def _hear(self, _: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        self.x = args[0] if args else kwargs["hidden_states"]
        self.kwargs = kwargs
        self.out = out[0] if isinstance(out, tuple) else out


def _alive(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every parameter at random; otherwise biases would be zeros and norms ones."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval().requires_grad_(False)


def _same(output: LayerOutput, out: Tensor, weights: Tensor) -> None:
    torch.testing.assert_close(output.weights, weights)
    torch.testing.assert_close(output.out, out)


def _ids() -> Tensor:
    return torch.randint(3, 50, (B, T))


def test_bert() -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=12, num_attention_heads=3, num_hidden_layers=2,
        intermediate_size=16, attn_implementation="eager",
    )  # fmt: skip
    model = _alive(BertModel(config))
    theirs = model.encoder.layer[1].attention
    inside, mixed = CapturedModule(theirs), CapturedModule(theirs.output.dense)
    visible = torch.arange(T) < torch.tensor([[T], [4]])
    maps = model(_ids(), attention_mask=visible.long(), output_attentions=True).attentions
    ours = MultiHeadAttention(12, 3, bias=True).double()
    ours.load_state_dict(theirs.state_dict())
    output = ours(inside.x, mask=visible[:, None, None], need_weights=True)
    _same(output, mixed.out, maps[1])


def test_gpt2() -> None:
    config = GPT2Config(
        vocab_size=50, n_embd=12, n_head=3, n_layer=2, n_positions=16, attn_implementation="eager"
    )
    model = _alive(GPT2Model(config))
    theirs = model.h[1].attn
    recorded = CapturedModule(theirs)
    maps = model(_ids(), output_attentions=True).attentions
    ours = MultiHeadAttention(12, 3, bias=True).double()
    ours.load_state_dict(theirs.state_dict())
    _same(ours(recorded.x, causal=True, need_weights=True), recorded.out, maps[1])


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (RoPE(6, base=500.0), {"rope_type": "default", "rope_theta": 500.0}),
        (RoPE(6, base=500.0, scaling=Llama3Scaling(4.0, trained_length=16)), LLAMA3),
    ],
    ids=["plain", "llama3"],
)
def test_llama(rope: RoPE, parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        num_hidden_layers=2, intermediate_size=16, rope_parameters=parameters,
        attn_implementation="eager",
    )  # fmt: skip
    model = _alive(LlamaModel(config))
    theirs = model.layers[1].self_attn
    recorded = CapturedModule(theirs)
    maps = model(_ids(), output_attentions=True).attentions
    ours = MultiHeadAttention(12, 4, 2, head_dim=6, rope=rope).double()
    ours.load_state_dict(theirs.state_dict())
    output = ours(recorded.x, causal=True, need_weights=True)
    # Theirs rotates in float32.
    torch.testing.assert_close(output.weights, maps[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.out, recorded.out, rtol=1e-4, atol=1e-5)


def test_qwen2_with_input_biases_only() -> None:
    config = Qwen2Config(
        vocab_size=50, hidden_size=24, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, intermediate_size=16, attn_implementation="eager",
    )  # fmt: skip
    model = _alive(Qwen2Model(config))
    theirs = model.layers[1].self_attn
    recorded = CapturedModule(theirs)
    maps = model(_ids(), output_attentions=True).attentions
    rope = RoPE(6, base=config.rope_parameters["rope_theta"])
    ours = MultiHeadAttention(24, 4, 2, rope=rope, bias="qkv").double()
    ours.load_state_dict(theirs.state_dict())
    output = ours(recorded.x, causal=True, need_weights=True)
    torch.testing.assert_close(output.weights, maps[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.out, recorded.out, rtol=1e-4, atol=1e-5)


def test_qwen3_with_normalised_queries_and_keys() -> None:
    config = Qwen3Config(
        vocab_size=50, hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        num_hidden_layers=2, intermediate_size=16, attn_implementation="eager",
    )  # fmt: skip
    model = _alive(Qwen3Model(config))
    theirs = model.layers[1].self_attn
    recorded = CapturedModule(theirs)
    maps = model(_ids(), output_attentions=True).attentions
    rope = RoPE(6, base=config.rope_parameters["rope_theta"])
    ours = MultiHeadAttention(12, 4, 2, head_dim=6, rope=rope, qk_norm=True).double()
    ours.load_state_dict(theirs.state_dict())
    output = ours(recorded.x, causal=True, need_weights=True)
    torch.testing.assert_close(output.weights, maps[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.out, recorded.out, rtol=1e-4, atol=1e-5)


def test_t5() -> None:
    config = T5Config(
        vocab_size=50, d_model=12, d_kv=5, num_heads=3, num_layers=2, d_ff=16,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
        attn_implementation="eager",
    )  # fmt: skip
    model = _alive(T5Model(config))
    sites = {
        "encoder": model.encoder.block[0].layer[0].SelfAttention,
        "decoder": model.decoder.block[0].layer[0].SelfAttention,
        "cross": model.decoder.block[0].layer[1].EncDecAttention,
    }
    recorded = {name: CapturedModule(module) for name, module in sites.items()}
    whole = model(input_ids=_ids(), decoder_input_ids=_ids()[:, :S], output_attentions=True)
    maps = whole.encoder_attentions, whole.decoder_attentions, whole.cross_attentions

    def ours(name: str, **options: Any) -> MultiHeadAttention:
        layer = MultiHeadAttention(12, 3, head_dim=5, scale=1.0, **options).double()
        layer.load_state_dict(sites[name].state_dict())
        return layer

    x = {name: site.x for name, site in recorded.items()}
    memory = recorded["cross"].kwargs["key_value_states"]
    encoder = ours("encoder", position_bias=T5Bias(3, 8, 16))
    decoder = ours("decoder", position_bias=T5Bias(3, 8, 16, bidirectional=False))
    outputs = {
        "encoder": encoder(x["encoder"], need_weights=True),
        "decoder": decoder(x["decoder"], causal=True, need_weights=True),
        "cross": ours("cross")(x["cross"], memory, need_weights=True),
    }
    for (name, site), theirs in zip(outputs.items(), maps, strict=True):
        _same(site, recorded[name].out, theirs[0])


YARN = {"rope_type": "yarn", "factor": 4.0}
TURNS = {"beta_fast": 16.0, "beta_slow": 2.0}


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
        (YaRN(4.0, 64), YARN | {"original_max_position_embeddings": 64}),
        (YaRN(4.0, 2048, 16.0, 2.0), YARN | TURNS | {"original_max_position_embeddings": 2048}),
        (Llama3Scaling(4.0, trained_length=16), LLAMA3),
    ],
    ids=["linear", "yarn", "yarn-turns", "llama3"],
)
def test_scaled_frequencies_are_those_of_transformers(
    scaling: Scaling, parameters: dict[str, Any]
) -> None:
    parameters = parameters | {"rope_theta": 5e3}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    theirs, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    torch.testing.assert_close(RoPE(64, base=5e3, scaling=scaling).frequencies(), theirs)
    assert scaling.magnitude == pytest.approx(magnitude)
