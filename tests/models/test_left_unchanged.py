"""Every verb leaves a model unchanged: modes, flags, gradients, weights, random state."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from folders import tiny_llama, word_tokenizer
from headwise._evaluation import in_evaluation
from headwise.corpora import Grammar
from headwise.lab import MiniGPT, MiniGPTConfig, evaluate, make_tokenizer, sample
from headwise.models import fingerprint
from headwise.roles import behavior, induction
from headwise.surgery import time_passes
from tiers import tiers

pytestmark = pytest.mark.usefixtures("fresh")

WORDS = ("<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(20)))
TEXTS = [f"w{n} w{n + 1} w5 w{n + 2} w7 w{n} w{n + 1} w5" for n in range(12)]
BATCHES = [
    {"input_ids": torch.tensor([[5, 9, 7, 3, 11, 8]]), "attention_mask": torch.ones(1, 6).long()},
    {"input_ids": torch.tensor([[4, 6, 6, 12]]), "attention_mask": torch.ones(1, 4).long()},
]


TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=word_tokenizer(WORDS), pad_token=WORDS[0]
)
QUICK = hw.Evidence(models=1, splits=1)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(WORDS)}


def _gpt2(name: str = "GPT2LMHeadModel") -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, **_TOKENS)
    model: nn.Module = getattr(transformers, name)(config)
    return model


def _llama() -> nn.Module:
    return tiny_llama(num_key_value_heads=4, attention_dropout=0.1, **_TOKENS)


def _model(verb: str) -> nn.Module:
    """A model in training with dropout, partly frozen on purpose."""
    torch.manual_seed(4)
    model = MODELS.get(verb, _gpt2)().train()
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers[0].eval()
    next(iter(layers[1].children())).eval()
    model.get_input_embeddings().requires_grad_(False)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.full_like(weight, 0.5)
    return model


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "gradients": {
            name: None if weight.grad is None else weight.grad.tolist()
            for name, weight in model.named_parameters()
        },
        "weights": {name: weight.tolist() for name, weight in model.state_dict().items()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
        "draws of torch": torch.get_rng_state().tolist(),
        "gradients are on": torch.is_grad_enabled(),
    }


def _recover(model: nn.Module, folder: Path) -> None:
    """Recover with the model as the teacher; another model is trained."""
    small = hw.prune(model, [(0, 0)])
    hw.recover(small, model, BATCHES, steps=2)


def _ablate(model: nn.Module, folder: Path) -> None:
    with hw.ablate(model, [(0, 1)], mode="mean", reference=BATCHES):
        pass


def _observe(model: nn.Module, folder: Path) -> None:
    with hw.observe(model) as watch, in_evaluation(model), torch.no_grad():
        model(**BATCHES[0])
    watch.table()


def _effects(model: nn.Module, folder: Path) -> None:
    roles = hw.find_roles(
        model, TEXTS, tokenizer=TOKENIZER, evidence=hw.Evidence(nulls=(), splits=1)
    )
    lost = behavior("loss", BATCHES, lambda output, batch: output.logits.mean((1, 2)))
    roles.effects(
        model, [lost, induction(model, TEXTS, tokenizer=TOKENIZER, sequences=4)], heads=[(0, 0)]
    )


def _curves(model: nn.Module, folder: Path) -> None:
    order = [hw.Head("", layer, head) for layer in range(2) for head in range(4)]
    hw.prune_curves(model, BATCHES, {"mine": [order]}, reference=BATCHES, points=[1, 3])


VERBS: dict[str, Callable[[nn.Module, Path], object]] = {
    "study": lambda model, folder: hw.study(model, TEXTS, tokenizer=TOKENIZER),
    "find_roles": lambda model, folder: hw.find_roles(
        model, TEXTS, tokenizer=TOKENIZER, evidence=QUICK
    ),
    **{
        f"importance by {method}": lambda model, folder, method=method: hw.importance(
            model, BATCHES, method
        )
        for method in ("half-gate", "gradient", "ablation", "zero-ablation", "gates")
    },
    "importance by curvature": lambda model, folder: hw.importance(
        model, BATCHES, "curvature", loss="embedding"
    ),
    "prune_curves": _curves,
    "ablate": _ablate,
    "observe": _observe,
    "prune": lambda model, folder: hw.prune(model, [(0, 0)], fold="mean", reference=BATCHES),
    "save": lambda model, folder: hw.save(model, folder / "saved"),
    "costs": lambda model, folder: hw.costs(model),
    "timed costs": lambda model, folder: hw.costs(model, BATCHES[0], timed=True),
    "time_passes": lambda model, folder: time_passes([model], BATCHES[0], passes=1),
    "recover": _recover,
    "effects": lambda model, folder: hw.effects(
        model, [("w1 w2", " w3", " w4")], tokenizer=TOKENIZER
    ),
    "effects of roles": _effects,
    "cache_plan": lambda model, folder: hw.cache_plan(model, BATCHES, keep=0.5, window=2, sinks=1),
    "fingerprint": lambda model, folder: fingerprint(model),
}
# The verbs that do not take a GPT-2 with its language head.
MODELS: dict[str, Callable[[], nn.Module]] = {"importance by curvature": lambda: _gpt2("GPT2Model")}


# Learned gates take many passes; the other methods of importance go the same way.
_LONG = ("importance by gates", "save")


@pytest.mark.parametrize("verb", tiers([v for v in VERBS if v not in _LONG], _LONG))
def test_every_verb_leaves_the_model_unchanged(verb: str, tmp_path: Path) -> None:
    model = _model(verb)
    before = _state(model)
    VERBS[verb](model, tmp_path)
    after = _state(model)
    assert {name for name in before if before[name] != after[name]} == set()


@pytest.mark.full
def test_what_reads_attention_alone_computes_no_logits() -> None:
    model, sizes, tables = _gpt2().eval(), [], []
    model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    examples = [hw.Example([5, 9, 7, n % 9, 8], (4, 5), [(0, 2)], [(2, 4)]) for n in range(8)]
    for number, reader in enumerate((model, model.transformer)):  # the second has no logits
        row = hw.BatchObserver(reader, tokenizer=TOKENIZER)({"text": TEXTS})
        tables.append(
            (
                hw.HeadTable.sum([row]).frame(),
                hw.find_heads(reader, examples, evidence=hw.Evidence(models=1)).frame(),
            )
        )
        if not number:
            assert set(sizes) == {1}
            hw.find_roles(model, TEXTS, tokenizer=TOKENIZER, evidence=QUICK)
            assert sum(size > 1 for size in sizes) == 1  # the pass that finds the unembedding
    for known, got in zip(*tables, strict=True):
        pd.testing.assert_frame_equal(known, got)


@pytest.mark.parametrize(
    ("verb", "passes"),
    [
        pytest.param(verb, passes, marks=[pytest.mark.full] * passes)
        for verb in VERBS
        if verb not in ("fingerprint", "observe")  # the first makes no pass, the second only ours
        for passes in ([0] if verb == "save" else [0, 1])
    ],
)
def test_an_exception_leaves_the_model_unchanged(verb: str, passes: int, tmp_path: Path) -> None:
    model = _model(verb)
    remaining = [passes]

    def fail(module: nn.Module, args: Any) -> None:
        if not remaining[0]:
            raise KeyboardInterrupt
        remaining[0] -= 1

    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers[1].mlp.register_forward_pre_hook(fail)
    before = _state(model)
    with pytest.raises(KeyboardInterrupt):
        VERBS[verb](model, tmp_path)
    after = _state(model)
    assert {name for name in before if before[name] != after[name]} == set()


GRAMMAR = Grammar()
GRAMMAR_TOKENIZER = make_tokenizer(GRAMMAR.vocabulary)

OF_MINI_GPT: dict[str, Callable[[MiniGPT], object]] = {
    "sample": lambda model: sample(
        model, "I work ,", tokenizer=GRAMMAR_TOKENIZER, max_new_tokens=3
    ),
    "evaluate": lambda model: evaluate(model, GRAMMAR, tokenizer=GRAMMAR_TOKENIZER, lines=5),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("verb", OF_MINI_GPT)
def test_every_verb_leaves_a_mini_gpt_unchanged(verb: str, fails: bool) -> None:
    """It is in training, with a frozen layer."""
    torch.manual_seed(4)
    model = MiniGPT(MiniGPTConfig(len(GRAMMAR.vocabulary), 40, 16, 4, n_layers=2, dropout=0.1))
    model.train().blocks[0].eval()

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    if fails:
        model.blocks[1].register_forward_pre_hook(fail)
    before = _state(model)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        OF_MINI_GPT[verb](model)
    after = _state(model)
    assert {name for name in before if before[name] != after[name]} == set()


class _Merging(nn.Linear):
    """A layer whose `train` has a side effect, as that of some adapters."""

    merged = False

    def train(self, mode: bool = True) -> "_Merging":
        self.merged = not mode
        return super().train(mode)


def test_switching_modes_has_no_side_effects() -> None:
    layer = _Merging(2, 2).train()
    with in_evaluation(layer):
        assert not layer.training
        assert not layer.merged
    assert layer.training
    assert not layer.merged
