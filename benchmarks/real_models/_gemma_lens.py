"""The heads of Gemma 3 270M as TransformerLens sees them, on the texts that `_gemma.py` read.

    # in an environment with transformer-lens 4.3.0 and torch
    python -m benchmarks.real_models._gemma_lens

Writes build/real-models/gemma-lens.json, which `study.py gemma` puts beside its own figures.
"""

import json
from pathlib import Path

import torch
import transformers
from transformer_lens.model_bridge import TransformerBridge

FOLDER = Path(__file__).parents[2] / "build" / "real-models"


def main() -> None:
    torch.set_num_threads(1)
    read = json.loads((FOLDER / "gemma-statistics.json").read_text("utf-8"))
    folder = FOLDER / "gemma"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model, tokenizer=tokenizer)
    sums = {"first": 0.0, "previous": 0.0, "after copy": 0.0}
    counts = dict.fromkeys(sums, 0)
    for name, rows in (("texts", read["texts"]), ("repeated", read["repeated"])):
        for ids in rows:
            pattern = patterns(bridge, ids)
            if name == "texts":
                masses = {"first": pattern[:, :, 0], "previous": pattern.diagonal(-1, 1, 2)}
            else:  # the token after the earlier copy of a query of the second half
                masses = {"after copy": pattern.diagonal(-49, 1, 2)[:, 2:]}
            for key, mass in masses.items():
                sums[key] += mass.double().sum(1)
                counts[key] += mass.shape[1] + (key == "previous")  # the first has none
    heads = {key: (total / counts[key]).tolist() for key, total in sums.items()}
    (FOLDER / "gemma-lens.json").write_text(json.dumps(heads), "utf-8")


@torch.no_grad()
def patterns(bridge: TransformerBridge, ids: list[int]) -> torch.Tensor:
    """The weights of all heads, one after another."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(bridge.cfg.n_layers)]
    _, cache = bridge.run_with_cache(torch.tensor([ids]), names_filter=lambda name: name in names)
    return torch.cat([cache[name][0] for name in names])


if __name__ == "__main__":
    main()
