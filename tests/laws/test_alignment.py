"""Alignment by cross-attention: exact weights, the best monotone path, and planted heads."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from architectures import CASES
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, HeadError, InputError
from headwise.kernels import weights_of_head
from headwise.models.texts import decoder_ids
from headwise.roles import AlignedBatch, FoundHeads
from headwise.roles.evidence import of_examples
from headwise.roles.examples import _align
from headwise.roles.examples._align import aligned, monotone_spans
from headwise.roles.examples._alignment_heads import known_examples
from headwise.roles.examples._found_heads import heads_of_examples
from oracles import padded
from planted_pairs import PlantedPairs, sharp_t5, spelled

SOURCES, TARGETS = [[5, 9, 7, 3, 11, 4], [8, 10, 3]], [[6, 2, 7], [12, 13, 9, 9, 1]]


def _eager(model: nn.Module, source: Sequence[int], target: Sequence[int]) -> list[Tensor]:
    """The cross-attention weights `[H, T, S]` of each layer that the model itself returns."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([decoder_ids(model, target)]),
            output_attentions=True,
        )
    model.set_attn_implementation("sdpa")
    return [layer[0] for layer in output.cross_attentions]


def _best_path(gains: np.ndarray) -> float:
    """The largest sum over all monotone paths, one by one."""
    T, S = gains.shape

    def best(t: int, s: int) -> float:
        if (t, s) == (T - 1, S - 1):
            return float(gains[t, s])
        steps = ((t, s + 1), (t + 1, s), (t + 1, s + 1))
        return float(gains[t, s]) + max(
            best(*step) for step in steps if step[0] < T and step[1] < S
        )

    return best(0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_the_path_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    T, S = rng.integers(1, 6, 2)
    weights = rng.dirichlet(np.full(S, 0.3), T)
    spans, gains = monotone_spans(weights), weights - 1 / S
    assert sum(gains[t, a:b].sum() for t, (a, b) in enumerate(spans)) == pytest.approx(
        _best_path(gains)
    )
    assert spans[0, 0] == 0
    assert spans[-1, 1] == S
    for (start, end), (next_start, _) in pairwise(spans):
        assert start < end
        assert next_start in (end - 1, end)


def test_peaks_in_order_are_found() -> None:
    weights = np.zeros((3, 7))
    weights[0, 0:2] = weights[1, 2:5] = weights[2, 5:7] = 1.0
    weights /= weights.sum(1, keepdims=True)
    assert monotone_spans(weights).tolist() == [[0, 2], [2, 5], [5, 7]]
    assert aligned(weights).mass.tolist() == [1.0, 1.0, 1.0]
    assert aligned(weights).times(0.5)[1].tolist() == [1.0, 2.5]


# Heads by pair, by name and by layer.
CHOSEN: list[tuple[Any, list[tuple[int, int]]]] = [
    ((0, 1), [(0, 1)]),
    (["decoder.cross.L1.H3", "decoder.cross.L0.H0"], [(1, 3), (0, 0)]),
    ({1: [0, 2]}, [(1, 0), (1, 2)]),
]


@pytest.mark.parametrize("side", ["left", "right"])
def test_alignments_are_those_of_eager_weights(side: str) -> None:
    model = sharp_t5()
    batch = {name: padded(SOURCES, side)[name] for name in ("input_ids", "attention_mask")}
    for heads, chosen in CHOSEN:
        ours = hw.align(model, batch, TARGETS, heads=heads)
        for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
            maps = _eager(model, source, target)
            mean = torch.stack([maps[layer][head] for layer, head in chosen]).mean(0)
            known = aligned(mean.double().numpy())
            assert ours[row].spans.tolist() == known.spans.tolist()
            np.testing.assert_allclose(ours[row].mass, known.mass, atol=1e-5)


def test_no_weights_of_other_heads_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(q: Tensor, k: Tensor, rule: Any, head: int, rows: range) -> Tensor:
        computed.append(head)
        return weights_of_head(q, k, rule, head, rows)

    monkeypatch.setattr(_align, "weights_of_head", counted)
    hw.align(
        sharp_t5(), {"input_ids": torch.tensor([SOURCES[0]])}, TARGETS[:1], heads=[(1, 2), (0, 3)]
    )
    assert sorted(computed) == [2, 3]


def test_heads_are_found_behind_a_prompt() -> None:
    """A prompt that nothing is known of changes no number: its tokens have no span."""
    model = PlantedPairs().eval()
    batches = [_stretched(16, seed) for seed in range(5)]
    found, prompted = (
        hw.find_alignment_heads(
            model,
            [replace(x, spans=[[None] * first + [*s[first:]] for s in x.spans]) for x in batches],
        )
        for first in (0, 2)
    )
    assert prompted.heads == found.heads
    assert prompted.set_row["outcome"] == found.set_row["outcome"]
    assert prompted.set_row["error"] == 0.0
    spans = [[None, None, *of[2:]] for of in batches[0].spans]
    (example, *_) = known_examples(model, replace(batches[0], spans=spans))[1]
    number, even = np.moveaxis(example.places(), -1, 0)
    first = [tokens[0] for tokens in example.words]
    assert number.tolist() == [[token - 2, token - 1] for token in first]
    step = len(example.columns) / (example.n_outputs - 2)
    np.testing.assert_allclose(even, number * step)


def test_encoder_outputs_take_the_place_of_the_source() -> None:
    model = sharp_t5()
    batch = {name: padded(SOURCES, "right")[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        encoded = model.encoder(**batch)
    mask = batch["attention_mask"]
    for given in (encoded, (encoded.last_hidden_state,)):
        inputs = {"encoder_outputs": given, "attention_mask": mask}
        for ours, known in zip(
            hw.align(model, inputs, TARGETS, heads=(1, 1)),
            hw.align(model, batch, TARGETS, heads=(1, 1)),
            strict=True,
        ):
            assert ours.spans.tolist() == known.spans.tolist()
            np.testing.assert_allclose(ours.mass, known.mass, atol=1e-6)


def test_a_planted_head_aligns_no_better_than_counting(tmp_path: Path) -> None:
    model = PlantedPairs().eval()
    found = hw.find_alignment_heads(model, [spelled(16, seed) for seed in range(5)])
    assert [str(head) for head in found.heads] == ["cross.L0.H2"]
    best = found.frame().set_index("name").loc["cross.L0.H2"]
    assert best["error"] == found.set_row["error"] == 0.0
    assert best["effect"] == 1.0
    # One output for each letter: the straight line is right, so no head is found against it.
    assert found.set_row["straight_line"] == 0.0
    assert found.set_row["outcome"] == "not found"
    with pytest.raises(ArgumentError, match=r"not found \(.*strongest baseline is always right\)"):
        found.export(tmp_path, "transformers")
    few = spelled(10, 0)  # however often they are given, and with whatever padding
    wider = _padded(few, 7)
    for batches in (few, [few] * 8, [few, wider, wider]):
        none = hw.find_alignment_heads(model, batches)
        assert none.set_row["outcome"] == "not tested: 5 held-out texts, 30 needed"
        given = 10 * (1 if batches is few else len(batches))
        assert none.notes[0].startswith(f"10 distinct examples of {given}; ")


def _padded(batch: AlignedBatch, n: int) -> AlignedBatch:
    """The same examples with more padding."""
    pads = {"input_ids": 1, "attention_mask": 0}
    inputs = {
        name: torch.nn.functional.pad(of, (0, n), value=pads[name])
        for name, of in batch.inputs.items()
    }
    return replace(batch, inputs=inputs)


def _stretched(n: int, seed: int) -> AlignedBatch:
    """Each letter stands in the source one to six times; all but the first belong to the next one.

    That is where the planted head looks: at what follows the letter written before.
    """
    rng, batch = np.random.default_rng(seed), spelled(n, seed)
    counts = [rng.integers(1, 7, len(output)) for output in batch.outputs]
    sources = [
        np.repeat(np.array(output) - 20, times).tolist()
        for output, times in zip(batch.outputs, counts, strict=True)
    ]
    starts = [[0, *(1 + np.cumsum([0, *times[:-2]])).tolist()] for times in counts]
    spans = [
        list(pairwise([*start, len(source)])) for start, source in zip(starts, sources, strict=True)
    ]
    inputs = {name: padded(sources, "right")[name] for name in ("input_ids", "attention_mask")}
    return AlignedBatch(inputs, batch.outputs, spans)


def _trailing(n: int, seed: int) -> AlignedBatch:
    """A letter for each output, then letters that nothing is written for."""
    batch = spelled(n, seed)
    ids = torch.cat([batch.inputs["input_ids"], torch.full((n, 6), 45)], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return AlignedBatch(inputs, batch.outputs, batch.spans)


def test_no_head_is_found_where_counting_outputs_is_enough() -> None:
    found = hw.find_alignment_heads(PlantedPairs().eval(), [_trailing(16, n) for n in range(5)])
    assert found.set_row["straight_line"] == 0.0
    assert found.set_row["outcome"] == "not found"


def test_found_heads_are_those_that_align_uses(tmp_path: Path) -> None:
    model = PlantedPairs().eval()
    found = hw.find_alignment_heads(model, [_stretched(16, seed) for seed in range(5)])
    of_set = found.set_row
    assert of_set["outcome"] == "found"
    assert of_set["error"] == 0.0 < 1.0 < of_set["straight_line"]
    assert of_set["start_offset"] == of_set["end_offset"] == 0.0
    rows = found.frame().set_index("name")
    assert rows.index[rows["found"]].tolist() == ["cross.L0.H2"]
    assert max(of_set["p_adj"], rows.loc["cross.L0.H2", "p_adj"]) < 0.05
    assert rows["why"].str.contains("lift").sum() == 3
    for shown in ("the set cross.L0.H2 is right in 100.0% of", ": found (p = ", "straight line"):
        assert shown in str(found)
    assert "<table" in found._repr_html_()
    assert "cross.L0.H2" in repr(found)
    loaded = hw.load_heads(found.save(tmp_path / "heads.json"), model)
    assert loaded.frame().equals(found.frame())
    assert {**vars(loaded), "rows": 0} == {**vars(found), "rows": 0}
    model.generation_config.alignment_heads = [[head.layer, head.head] for head in loaded.heads]
    batch = _stretched(3, 99)
    named, written = (
        hw.align(model, batch.inputs, batch.outputs, heads=heads) for heads in ([(0, 2)], None)
    )
    for ours, known in zip(written, named, strict=True):
        assert ours.spans.tolist() == known.spans.tolist()
    with pytest.raises(HeadError, match=r"cross\.L0\.H2 belongs to a stack, and qrhead numbers"):
        found.export(tmp_path / "a.yaml", "qrhead", model_name="a/b")


def test_a_set_that_errs_like_a_straight_line_is_not_found() -> None:
    """Its head chooses the right words, but something is against the set."""
    right, selection = np.ones((80, 2)), np.arange(80) < 40
    nulls = {"chance": np.full((80, 1), 0.1)}
    family = of_examples("alignment", right, right[:, 0], nulls, {"chance": "chance"}, selection)
    found = heads_of_examples(
        PlantedPairs(), [hw.Head("cross", 0, 2)], [0], family, selection, 0, examples=[],
        n_given=80, columns={}, objection="its error is large",
    )  # fmt: skip
    assert found.rows["found"].all()
    assert not found.set_row["found"]
    assert "not found (its error is large)" in str(found)


def _changed(batch: AlignedBatch, change: Any) -> AlignedBatch:
    """The same examples with other spans."""
    return replace(batch, spans=[change(spans) for spans in batch.spans])


def test_spans_of_other_examples_find_no_head() -> None:
    """The planted head, and heads that are random, against spans that say nothing of a source."""
    batches = [_stretched(16, seed) for seed in range(5)]
    lengths = [int(mask.sum()) for batch in batches for mask in batch.inputs["attention_mask"]]
    rng = np.random.default_rng(0)

    def drawn(spans: Any) -> list[tuple[int, int]]:
        inner = sorted(1 + rng.permutation(spans[-1][1] - 1)[: len(spans) - 1])
        return list(pairwise([0, *map(int, inner), spans[-1][1]]))

    found = hw.find_alignment_heads(
        PlantedPairs().eval(), [_changed(batch, drawn) for batch in batches]
    )
    assert found.set_row["outcome"] == "not found"
    assert not found.rows["found"].any()
    assert found.rows["texts"].eq(len(lengths) // 2).all()


def test_a_constant_offset_is_removed_and_reported() -> None:
    model, start, end = PlantedPairs().eval(), 2, 1
    batches = [_stretched(16, seed) for seed in range(5)]
    plain = hw.find_alignment_heads(model, batches)
    late = [
        _changed(
            replace(
                batch,
                inputs={
                    name: torch.nn.functional.pad(of, (0, 3), value=int(name != "input_ids"))
                    for name, of in batch.inputs.items()
                },
            ),
            lambda spans: [
                (first + start, max(last + end, first + start + 1)) for first, last in spans
            ],
        )
        for batch in batches
    ]
    shifted = hw.find_alignment_heads(model, late)
    assert shifted.heads == plain.heads
    offset = shifted.set_row["start_offset"], shifted.set_row["end_offset"]
    assert offset == (-start, -end)
    (line,) = hw.align(model, batches[0].inputs, batches[0].outputs, heads=shifted.heads)[:1]
    np.testing.assert_allclose(line.times(0.5, offset), (line.spans + np.array([start, end])) * 0.5)


def test_neighbors_with_the_same_span_are_one_word() -> None:
    """Its start is that of its first output, and its end that of its last."""
    model, batches = PlantedPairs().eval(), [_stretched(16, seed) for seed in range(5)]

    def paired(spans: Any) -> list[tuple[int, int]]:
        starts = [spans[token - token % 2][0] for token in range(len(spans))]
        ends = [spans[min(token - token % 2 + 1, len(spans) - 1)][1] for token in range(len(spans))]
        return list(zip(starts, ends, strict=True))

    single, words = (
        hw.find_alignment_heads(model, each)
        for each in (batches, [_changed(batch, paired) for batch in batches])
    )
    assert (words.set_row["error"], words.set_row["outcome"]) == (0.0, "found")
    assert words.heads == single.heads
    assert words.rows["n"].iloc[0] < 0.65 * single.rows["n"].iloc[0]


def _whisper_tokenizer() -> Any:
    """A token for each byte, and one for two letters of Japanese; a prompt and an end around."""
    letters = ByteLevel.alphabet()
    names = ["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>", *sorted(letters)]
    known = Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    known.pre_tokenizer, known.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    known.add_tokens([WHOLE])
    known.add_special_tokens(names[:3])
    ends = [(name, number) for number, name in enumerate(names[:3])]
    known.post_processor = TemplateProcessing(single=f"{names[0]} {names[1]} $A {names[2]}",
                                              special_tokens=ends)  # fmt: skip
    return transformers.PreTrainedTokenizerFast(tokenizer_object=known)


WHOLE = "\u308c\u3066"  # ends one word and begins another
SENTENCES = [
    (" so well-known a", ["so", "well", "known", "a"]),
    (" so it's.", ["so", "it's."]),
    ("\u52d5\u7269\u306f\u75b2\u308c", ["\u52d5\u7269", "\u306f", "\u75b2\u308c"]),
    ("\u75b2\u308c\u3066\u3044", ["\u75b2\u308c", "\u3066\u3044"]),
]


@pytest.mark.parametrize(("text", "words"), SENTENCES)
def test_sounds_and_words_become_examples(text: str, words: list[str]) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=8)
    tokenizer = _whisper_tokenizer()
    processor = SimpleNamespace(feature_extractor=extractor, tokenizer=tokenizer)
    sounds = [np.zeros(16000, np.float32), np.zeros(8010, np.float32)]
    timed = [(0.2 * number, 0.2 * number + 0.1, word) for number, word in enumerate(words)]
    batch = AlignedBatch.of_words(processor, sounds, [text, " a"], [timed, [(0.0, 0.5, "a")]])
    assert batch.inputs["input_features"].shape == (2, 8, 3000)
    assert batch.lengths == [50, 26]
    output, spans = batch.outputs[0], batch.spans[0]
    assert output == tokenizer(text).input_ids[1:]  # the tokens of the text itself
    assert spans[0] is spans[-1] is None
    first = -1
    for number, word in enumerate(words):
        first = text.index(word, first + 1)
        known = (10 * number, 10 * number + 5)
        tokens = tokenizer(text[:first]).input_ids[1:-1], tokenizer(text[: first + len(word)])
        for span in spans[len(tokens[0]) : len(tokens[1].input_ids[1:-1])]:
            assert span == ((0, 15) if WHOLE in text else known)
    assert batch.spans[1] == [None, None, (0, 25), None]


def test_words_that_are_not_in_their_text_are_refused() -> None:
    processor = SimpleNamespace(feature_extractor=object(), tokenizer=_whisper_tokenizer())
    sounds = [np.zeros(16000, np.float32)]
    of_words = AlignedBatch.of_words
    with pytest.raises(ArgumentError, match="1 sounds, 2 texts and 1 lists of words"):
        of_words(processor, sounds, ["a", "b"], [[]])
    with pytest.raises(ArgumentError, match="an int has no feature extractor"):
        of_words(7, sounds, ["a"], [[]])
    processor.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=8)
    with pytest.raises(ArgumentError, match="the word 'so' is not in ' a', which is left of"):
        of_words(processor, sounds, ["so a"], [[(0.0, 0.1, "so"), (0.1, 0.2, "so")]])


def test_a_folder_of_ctranslate2_gets_the_heads(tmp_path: Path) -> None:
    found = _found()
    config = tmp_path / "config.json"
    for content in ("{}", "[]"):
        config.write_text(content)
        with pytest.raises(InputError, match=r"config\.json .*Give the folder of a Whisper that"):
            found.export(tmp_path, "ctranslate2")
    config.write_text('{"alignment_heads": [[0, 0]], "lang_ids": [7]}')
    assert found.export(str(tmp_path), "ctranslate2") == config
    assert json.loads(config.read_text()) == {
        "alignment_heads": [[1, 3]], "lang_ids": [7], "alignment_heads_note": NOTE
    }  # fmt: skip


NOTE = "headwise , model : the set decoder.cross.L1.H3 is right in 75.0% of 40 held-out cases "
NOTE += "[50.0%, 87.5%], against 25.0% of chance: found (p = 0.002)"


def _found() -> FoundHeads:
    head, numbers = (
        hw.Head("decoder.cross", 1, 3),
        {"effect": 0.75, "ci_low": 0.5, "ci_high": 0.875},
    )
    numbers |= {"baseline": 0.25, "p_adj": 0.002, "n": 40.0}
    of_set = {"found": True, "outcome": "found", "null": "chance", **numbers}
    return FoundHeads(pd.DataFrame({"name": [str(head)]}), (head,), of_set)


def test_whisper_reads_what_is_written() -> None:
    model, batch = CASES["WhisperForConditionalGeneration"].make()
    model.generation_config.alignment_heads = [[1, 2], [0, 3]]
    features = batch["input_features"][:1]
    (ours,) = hw.align(model, {"input_features": features}, [[7, 9, 11, 2]], lengths=[8])
    assert ours.spans.shape == (4, 2)
    assert ours.spans[-1, 1] == 8
    with pytest.raises(ArgumentError, match=r"lengths=\[11\] for sources of \[10\]"):
        hw.align(model, {"input_features": features}, [[7, 9]], lengths=[11])


def test_a_saved_model_gets_the_heads(tmp_path: Path) -> None:
    sharp_t5().save_pretrained(tmp_path)
    _found().export(tmp_path, "transformers")
    for _ in range(2):
        loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
        assert loaded.generation_config.alignment_heads == [[1, 3]]
        assert loaded.generation_config.alignment_heads_note == NOTE
        loaded.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"generation_config\.json .*a saved model that writes"):
        _found().export(tmp_path / "none", "transformers")
