"""The sizes of well-known models, from their papers."""

from collections.abc import Mapping
from types import MappingProxyType

from headwise.counts._sizes import ModelSizes, layer_sizes

_BERT = "Devlin et al. 2019, section 3 (arXiv:1810.04805)"
_GPT2 = "Radford et al. 2019, table 2; heads as in the released models"
_GPT3 = "Brown et al. 2020, table 2.1 (arXiv:2005.14165)"
_LLAMA = "Touvron et al. 2023, table 2 (arXiv:2302.13971)"
_LLAMA_2 = "Touvron et al. 2023, table 1 (arXiv:2307.09288); widths as in the released model"
_MISTRAL = "Jiang et al. 2023, table 1 (arXiv:2310.06825)"

# d_model, heads, kv heads, layers, and the parameters of the whole model, each counted once.
_BIASED = {
    "bert-base": (768, 12, 12, 12, 109_482_240, _BERT),
    "bert-large": (1024, 16, 16, 24, 335_141_888, _BERT),
    "gpt2": (768, 12, 12, 12, 124_439_808, _GPT2),
    "gpt2-medium": (1024, 16, 16, 24, 354_823_168, _GPT2),
    "gpt2-large": (1280, 20, 20, 36, 774_030_080, _GPT2),
    "gpt2-xl": (1600, 25, 25, 48, 1_557_611_200, _GPT2),
    "gpt3-175b": (12288, 96, 96, 96, 174_604_259_328, _GPT3),
}
_UNBIASED = {
    "llama-7b": (4096, 32, 32, 32, 6_738_415_616, _LLAMA),
    "llama-2-70b": (8192, 64, 8, 80, 68_976_648_192, _LLAMA_2),
    "mistral-7b": (4096, 32, 8, 32, 7_241_732_096, _MISTRAL),
}


def _models() -> dict[str, ModelSizes]:
    models = {}
    for biases, rows in (("QKVO", _BIASED), ("", _UNBIASED)):
        for name, (d_model, n_heads, n_kv_heads, n_layers, total, source) in rows.items():
            layer = layer_sizes(d_model, n_heads, n_kv_heads, biases=biases)
            models[name] = ModelSizes(
                name, layer, n_layers, total, source, has_cache=not name.startswith("bert")
            )
    return models


PRESETS: Mapping[str, ModelSizes] = MappingProxyType(_models())
"""Well-known models by name."""
