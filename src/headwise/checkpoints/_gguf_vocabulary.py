"""The vocabulary of a GGUF file: the tokens, merges and special tokens of a tokenizer.

llama.cpp cuts texts by rules of its own, which a file chooses by name. A tokenizer is written if
the rules, as src/llama-vocab.cpp has them, give the same tokens for every text; of Unicode's normal
forms (NFC) llama.cpp knows none, and reads texts that are composed already.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from headwise._extras import require
from headwise.errors import UnsupportedError

# What does not change the tokens that a step of a tokenizer makes.
_IRRELEVANT = ("trim_offsets",)
_PREPEND, _REPLACE = "Prepend ▁", "Replace {'String': ' '} ▁"
_NEVER = ("Metaspace ▁ never False", "Metaspace ▁ never True")
# The steps that put SentencePiece's "▁" for a space, and whether one stands before each text too.
_SPACES = {(_PREPEND, _REPLACE): True, (_REPLACE,): False} | {(step,): False for step in _NEVER}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT = "Split {} Isolated False"
# How a byte-level tokenizer splits a text before it merges: llama.cpp knows these by name.
_SPLITS = {
    ("ByteLevel False True",): "gpt-2",
    ("Digits True", "ByteLevel False True"): "smollm",
    (_SPLIT.format({"Regex": rf"{_WORDS}\p{{N}}{_REST}"}), "ByteLevel False False"): "qwen2",
    (
        _SPLIT.format({"Regex": _WORDS + r"\p{N}{1,3}" + _REST}),
        "ByteLevel False False",
    ): "llama-bpe",
}
# With this one llama.cpp takes words that are tokens as they are, before any merge.
_WHOLE_WORDS = "llama-bpe"
_SPACES_BEFORE = ("Metaspace ▁ first", "Metaspace ▁ always")
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


def vocabulary(tokenizer: Any, size: int, config: Any) -> dict[str, Any]:
    """The fields of a file, by the names of the methods of `GGUFWriter` that add them.

    Args:
        size: How many tokens the model has; those that the tokenizer lacks are unused.
        config: The model's, which names special tokens where the tokenizer names none.
    Raises:
        UnsupportedError: llama.cpp would cut some texts into other tokens.
    """
    kind = require("gguf", "gguf", "save").TokenType
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(backend.to_str()) if hasattr(backend, "to_str") else {}
    model, added = state.get("model", {}), state.get("added_tokens", [])
    before, after = _around(tokenizer) if state else ([], [])
    for why in _differences(state, backend, size, before, after):
        raise UnsupportedError(
            f"save: llama.cpp would cut texts into other tokens than this "
            f"{type(tokenizer).__name__}: {why}. Or leave the tokenizer out, and give llama.cpp "
            f"tokens."
        )
    by_byte = bool(model.get("byte_fallback"))
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [kind.UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number] = token
        kinds[number] = kind.BYTE if by_byte and token in _BYTES else kind.NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = kind.CONTROL if token["special"] else kind.USER_DEFINED
        if token["content"] == model.get("unk_token"):
            kinds[token["id"]] = kind.UNKNOWN
    fields: dict[str, Any] = {"token_list": tokens, "token_types": kinds}
    merges = _merges(model)
    if by_byte:
        scores = {token: -float(rank) for token, rank in _ranks(model).items()}
        fields |= {
            "tokenizer_model": "llama",
            "add_space_prefix": _SPACES[_steps(state)],
            # llama.cpp merges the pair whose token has the highest score.
            "token_scores": [scores.get(token, -float(len(merges))) for token in tokens],
        }
    else:
        fields |= {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": _SPLITS[_steps(state)],
            "token_merges": [" ".join(pair) for pair in merges],
        }
    special = {
        name: getattr(tokenizer, f"{name}_token_id", getattr(config, f"{name}_token_id", None))
        for name in ("bos", "eos", "pad")
    } | {"unk": model["vocab"].get(model.get("unk_token"))}
    special |= {"bos": before[0]} if before else {}
    special |= {"eos": after[0]} if after else {}
    for name, number in special.items():
        if type(number) is int and number < size:
            fields[f"{name}_token_id"] = number
    fields |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    template = getattr(tokenizer, "chat_template", None)
    return fields | ({"chat_template": template} if isinstance(template, str) else {})


def _differences(
    state: Mapping[str, Any], backend: Any, size: int, before: Sequence[int], after: Sequence[int]
) -> Iterator[str]:
    """Why llama.cpp would cut some text otherwise, and what to do."""
    model, steps = state.get("model", {}), _steps(state)
    by_byte = bool(model.get("byte_fallback"))
    for step in steps:
        if step.startswith(_SPACES_BEFORE):
            yield (
                f"its step {step!r} puts ▁ only before a text without a space at its beginning, "
                f"and llama.cpp before every text between special tokens. If its tokenizer.json "
                f"has the steps Prepend and Replace, as those of Llama 2 and Mistral, open it with "
                f"PreTrainedTokenizerFast.from_pretrained"
            )
    known: Mapping[tuple[str, ...], Any] = _SPACES if by_byte else _SPLITS
    if model.get("type") != "BPE" or steps not in known:
        yield (
            f"its model is {model.get('type', 'none of tokenizers')}, its way of splitting texts "
            f"{[*steps]}. Give one of the kinds that it knows: Llama 2, Llama 3, Qwen 2, GPT-2, "
            f"SmolLM"
        )
    for option in _OPTIONS:
        if model.get(option):
            yield f"it has {option}={model[option]!r}. Train it without"
    alphabet = _BYTES if by_byte else _byte_letters() if model.get("unk_token") else ()
    for token in alphabet:
        if token not in model["vocab"]:
            yield f"it lacks the token {token!r} of a byte. Train it with all 256"
    yield from _of_added_tokens(state, backend)
    numbers = model["vocab"] | {x["content"]: x["id"] for x in state["added_tokens"]}
    last = max(numbers, key=numbers.__getitem__)
    if numbers[last] >= size:
        yield (
            f"its token {last!r} is number {numbers[last]}, and the model has {size} tokens. Call "
            f"model.resize_token_embeddings({numbers[last] + 1}) first"
        )
    if max(len(before), len(after)) > 1:
        yield (
            f"it puts the tokens {[*before]} before a text and {[*after]} after it, and llama.cpp "
            f"one. Set a post_processor with one at most"
        )
    yield from _of_merges(model, steps, state["added_tokens"])


def _of_added_tokens(state: Mapping[str, Any], backend: Any) -> Iterator[str]:
    for token in state["added_tokens"]:
        content = token["content"]
        for option in ("lstrip", "rstrip", "single_word"):
            if token[option]:
                yield f"it has the added token {content!r} with {option}=True. Add it without"
        if token["normalized"] and backend.normalizer is not None:
            found = backend.normalizer.normalize_str(content)
            if found != content:
                yield (
                    f"it looks for the added token {content!r} as {found!r}. Add it with "
                    f"normalized=False"
                )


def _of_merges(
    model: Mapping[str, Any], steps: Sequence[str], added: Sequence[Any]
) -> Iterator[str]:
    """Tokens that one of both merges, and the other does not."""
    by_byte, whole = bool(model.get("byte_fallback")), bool(model.get("ignore_merges"))
    if by_byte and steps[0] == _NEVER[1]:
        for left, right in _merges(model):
            if "▁" in (left + right)[1:]:
                yield f"it splits texts at ▁, and {left + right!r} is a token. Train it without"
    # SentencePiece merges whatever pair is a token: all of them must come of merges here too.
    if by_byte or whole != (_SPLITS[(*steps,)] == _WHOLE_WORDS):
        reached = _ranks(model) | dict.fromkeys(x["content"] for x in added)
        for token in model["vocab"]:
            if len(token) > 1 and token not in reached and token not in _BYTES:
                yield f"no merges give its token {token!r}. Remove it, or add it as a token"


def _ranks(model: Mapping[str, Any]) -> dict[str, int]:
    """For each token that merges give, the rank of the last one of them."""
    ranks = {pair: rank for rank, pair in reversed([*enumerate(_merges(model))])}
    reached = {}
    for token in model["vocab"]:
        parts = [*token]
        while len(parts) > 1:
            pairs = [ranks.get(pair, len(ranks)) for pair in pairwise(parts)]
            rank = min(pairs)
            if rank == len(ranks):
                break
            place = pairs.index(rank)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            if len(parts) == 1:
                reached[token] = rank
    return reached


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return [(left, right) for left, right in pairs]


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text and after it."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    plain, whole = (getattr(x, "ids", x) for x in (plain, whole))
    starts = range(len(whole) - len(plain) + 1)
    start = next(n for n in starts if whole[n : n + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in byte-level vocabularies."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _steps(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The steps in which a tokenizer normalizes and splits a text, each with what decides in it.

    The one that composes characters is left out.
    """
    steps: list[Mapping[str, Any]] = []
    for part in filter(None, (state.get("normalizer"), state.get("pre_tokenizer"))):
        steps += part.get("normalizers", part.get("pretokenizers", [part]))
    described = (
        " ".join(str(x) for name, x in step.items() if name not in _IRRELEVANT) for step in steps
    )
    return tuple(step for step in described if step != "NFC")
