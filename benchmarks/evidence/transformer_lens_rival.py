"""Heads beside TransformerLens: two kinds of models, their direct effects, and their names.

    make rivals PAIRS=stsb-en-dev.csv
    python -m benchmarks.evidence.transformer_lens_rival --into benchmarks/results/rivals.md

Models have random weights, none of them small, gains and biases included. TransformerLens stacks
what heads add to the residual stream and divides by the scale of the last norm; its gain and the
difference of the unembeddings are multiplied here. Each head is also set to zero in both
libraries, by its name in ours and by its layer and index in theirs.
"""

import copy
import tempfile
import warnings
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor

import headwise as hw
from benchmarks._report import parser_of, show, software, table
from headwise.corpora import SPECIALS
from headwise.lab import make_tokenizer

PART = "transformer-lens"
WORDS, EXAMPLES, LAYERS, HEADS = 97, 12, 5, 4
SIZES = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 24, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
LLAMA = {"hidden_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}


def models() -> dict[str, tuple[Any, str]]:
    """By kind, the model and the name of its last norm."""
    return {
        "GPT-2": (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **GPT2)),
            "transformer.ln_f",
        ),
        "Llama": (
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA)),
            "model.norm",
        ),
    }


def bridge_of(model: Any) -> Any:
    """The model as TransformerLens reads it."""
    from transformer_lens.model_bridge import TransformerBridge

    words = [*SPECIALS, *(f"w{n}" for n in range(WORDS - len(SPECIALS)))]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(words), bos_token="<bos>", eos_token="<eos>"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # It takes the modules of the model for its own.
        return TransformerBridge.boot_transformers(
            folder,
            hf_model=copy.deepcopy(model),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            device="cpu",
        )


def theirs(
    model: Any, bridge: Any, norm: str, examples: list[tuple[list[int], int, int]]
) -> Tensor:
    """The direct effect of each head in each example, by TransformerLens."""
    gain, rows = model.get_submodule(norm).weight, model.lm_head.weight
    effects = []
    for ids, right, other in examples:
        _, cache = bridge.run_with_cache(torch.tensor([ids]))
        added = cache.stack_head_results(layer=-1, pos_slice=-1)
        added = cache.apply_ln_to_stack(added, layer=-1, pos_slice=-1)[:, 0]
        effects.append(added * gain @ (rows[right] - rows[other]))
    return torch.stack(effects)


def gap_without(model: Any, bridge: Any, head: hw.Head, ids: Tensor) -> float:
    """How far the logits of both libraries differ without a head, as a share of what it changes."""

    def zero(z: Tensor, hook: Any) -> Tensor:
        z[:, :, head.head] = 0
        return z

    hooks = [(f"blocks.{head.layer}.attn.hook_z", zero)]
    expected = bridge.run_with_hooks(ids, fwd_hooks=hooks)
    with hw.ablate(model, str(head)):
        logits = model(ids).logits
    return float((logits - expected).abs().max() / (logits - model(ids).logits).abs().max())


@torch.no_grad()
def row_of(kind: str, model: Any, norm: str) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        std = 0.3 if weight.ndim > 1 else 0.5
        weight.normal_(mean=float("norm" in name or "ln" in name), std=std, generator=generator)
    examples = []
    for _ in range(EXAMPLES):
        ids = torch.randint(5, WORDS, (int(torch.randint(4, 20, (), generator=generator)),),
                            generator=generator).tolist()  # fmt: skip
        right, other = torch.randperm(WORDS, generator=generator)[:2].tolist()
        examples.append((ids, right, other))
    effects = hw.effects(model.eval(), examples, total=None).frame()
    ours, bridge = effects["direct"].to_numpy(), bridge_of(model)
    expected = theirs(model, bridge, norm, examples).mean(0).numpy()
    gap, largest = abs(ours - expected).max(), abs(expected).max()
    assert gap <= 1e-4 * largest, f"{kind}: {gap} of {largest}"
    ids = torch.tensor(examples[0][:1])
    without = max(gap_without(model, bridge, hw.Head.parse(name), ids) for name in effects["name"])
    assert without <= 1e-4, f"{kind}: {without}"
    return [kind, str(len(ours)), f"{largest:.3f}", f"{gap / largest:.0e}", f"{without:.0e}"]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows = [row_of(kind, *made) for kind, made in models().items()]
    titles = (
        "model", "heads", "largest effect", "largest difference, of it",
        "logits without a head: largest difference, of the change",
    )  # fmt: skip
    about = f"TransformerLens {version('transformer-lens')}, {software()}."
    show(f"{about}\n\n{table(titles, rows)}", options.into, PART)


if __name__ == "__main__":
    main()
