"""Lists of heads in the files of other tools; each form was read from the tool's own parser."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headwise.errors import ArgumentError, HeadError, InputError
from headwise.files import read_object, write_beside, write_json
from headwise.tables import Head

Pairs = Sequence[tuple[int, int]]  # layer and query head
_NOTE = "alignment_heads_note"  # a key that Transformers keeps and CTranslate2 skips


def export_heads(
    path: Path, format: str, heads: Sequence[Head], model_name: str, queries: str, note: str
) -> Path:
    """Write a list of heads, and a note on them, in the form of another tool: see
    `FoundHeads.export`."""
    if format not in _EXPORTS:
        raise ArgumentError(
            f"FoundHeads.export: no format {format!r}. Choose from {', '.join(_EXPORTS)}."
        )
    is_cross, write = _EXPORTS[format]
    for head in heads:
        if is_cross and head.stack.rpartition(".")[2] != "cross":
            raise HeadError(
                f"FoundHeads.export: {head} is no head of cross-attention, and {format} lists no "
                f"others. Export heads of find_alignment_heads."
            )
        if head.stack and not is_cross:
            raise HeadError(
                f"FoundHeads.export: {head} belongs to a stack, and {format} numbers layers of "
                f"one stack. Export heads of a model with one stack."
            )
    return write(path, [(head.layer, head.head) for head in heads], model_name, queries, note)


def ending_in(ending: str, caller: str, path: Path) -> Path:
    """The path."""
    if path.suffix != ending:
        raise ArgumentError(f"{caller}: {path} ends in {path.suffix!r}. End it in {ending}.")
    return path


def _vllm_hook(path: Path, heads: Pairs, model: str, queries: str, note: str) -> Path:
    """A model configuration of vLLM-Hook: `HookLLM.load_config` reads `params` and `hookq`."""
    content = {
        "model_info": {
            "provider": "attn-hf",
            "name": model.rpartition("/")[2],
            "model_id": _named(model),
            "note": note,
        },
        "params": {"important_heads": [list(head) for head in heads]},
        "hookq": {"hookq_mode": queries},
    }
    return write_json(content, ending_in(".json", "FoundHeads.export", path), 4)


def _qrhead(path: Path, heads: Pairs, model: str, queries: str, note: str) -> Path:
    """A configuration of QRRetriever: `attn_head_set` is split at commas, then at hyphens.

    A quoted JSON string is a YAML string. QRRetriever always takes all tokens of its query.
    """
    fields = {
        "attn_head_set": ",".join(f"{layer}-{head}" for layer, head in heads),
        "model_base_class": model.rpartition("/")[2],
        "model_name_or_path": _named(model),
    }
    lines = [f"# {note}\n", *(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())]
    with write_beside(ending_in(".yaml", "FoundHeads.export", path)) as beside:
        beside.write_text("".join(lines), "utf-8")
    return path


def _named(model: str) -> str:
    if not model:
        raise ArgumentError(
            "FoundHeads.export: model_name=None, and the model's configuration has no name. Give "
            "model_name='owner/name'."
        )
    return model


def _transformers(path: Path, heads: Pairs, model: str, queries: str, note: str) -> Path:
    """The list by which a Whisper of Transformers times words, and which `align` reads."""
    file, advice = path / "generation_config.json", "Give the folder of a saved model that writes."
    config = read_object(file, "FoundHeads.export", advice)
    # Transformers drops fields of its own from files that claim to follow from the config.
    config.pop("_from_model_config", None)
    return write_json(config | {"alignment_heads": heads, _NOTE: note}, file)


def _ctranslate2(path: Path, heads: Pairs, model: str, queries: str, note: str) -> Path:
    """The same list in a Whisper of CTranslate2, which faster-whisper reads."""
    file, advice = path / "config.json", "Give the folder of a Whisper that CTranslate2 converted."
    config = read_object(file, "FoundHeads.export", advice)
    if "alignment_heads" not in config:  # a folder of Transformers has a config.json too
        raise InputError(f"FoundHeads.export: {file} has no alignment_heads. {advice}")
    return write_json(config | {"alignment_heads": heads, _NOTE: note}, file)


# Whether a tool lists heads of cross-attention, and what writes its file.
_EXPORTS: Mapping[str, tuple[bool, Callable[[Path, Pairs, str, str, str], Path]]] = {
    "vllm-hook": (False, _vllm_hook),
    "qrhead": (False, _qrhead),
    "transformers": (True, _transformers),
    "ctranslate2": (True, _ctranslate2),
}
