"""Worked examples of the lab: figures that can be checked by hand."""

import torch

from headwise.corpora import Grammar
from headwise.lab import MiniGPT, MiniGPTConfig


def count(config):
    return sum(parameter.numel() for parameter in MiniGPT(config).parameters())


def test_the_parameters_of_a_small_model():
    config = MiniGPTConfig(vocab_size=11, context=5, d_model=6, n_heads=3, n_layers=2, mlp_ratio=2)
    embeddings = 11 * 6 + 5 * 6
    attention = 4 * 6 * 6
    mlp = 6 * 12 + 12 + 12 * 6 + 6
    norms = 2 * 2 * 6
    head = 6 * 11
    assert count(config) == embeddings + 2 * (attention + mlp + norms) + 2 * 6 + head


def test_shared_keys_and_values_save_their_share():
    whole = MiniGPTConfig(11, d_model=6, n_heads=3, n_layers=1)
    shared = MiniGPTConfig(11, d_model=6, n_heads=3, n_kv_heads=1, n_layers=1)
    assert count(whole) - count(shared) == 2 * 6 * (6 - 2)


def test_an_untrained_model_scores_chance():
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(len(Grammar().vocabulary)))
    ids = torch.arange(40)[None]
    spread = model(ids).softmax(-1)
    # Nearly uniform: none of 396 words has a fifth of the probability.
    assert spread.max() < 0.2
