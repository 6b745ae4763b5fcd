"""The forms in which other tools read lists of heads; each was read from the tool's own parser."""

import json
from collections.abc import Callable, Mapping, Sequence

Pairs = Sequence[tuple[int, int]]  # layer and query head


def _vllm_hook(heads: Pairs, model: str, queries: str) -> str:
    """A model configuration of vLLM-Hook: `HookLLM.load_config` reads `params` and `hookq`."""
    content = {
        "model_info": {
            "provider": "attn-hf",
            "name": model.rpartition("/")[2],
            "model_id": model,
            "note": "Heads found by headwise.find_heads, with evidence on held-out examples.",
        },
        "params": {"important_heads": [list(head) for head in heads]},
        "hookq": {"hookq_mode": queries},
    }
    return json.dumps(content, indent=4) + "\n"


def _qrhead(heads: Pairs, model: str, queries: str) -> str:
    """A configuration of QRRetriever: `attn_head_set` is split at commas, then at hyphens.

    A quoted JSON string is a YAML string. QRRetriever always takes all tokens of its query.
    """
    fields = {
        "attn_head_set": ",".join(f"{layer}-{head}" for layer, head in heads),
        "model_base_class": model.rpartition("/")[2],
        "model_name_or_path": model,
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())


# The ending of the file, and what writes its content.
EXPORTS: Mapping[str, tuple[str, Callable[[Pairs, str, str], str]]] = {
    "vllm-hook": (".json", _vllm_hook),
    "qrhead": (".yaml", _qrhead),
}
