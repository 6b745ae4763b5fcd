"""A SentenceTransformer is watched, scored, pruned and saved with all of its modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import headwise as hw
from headwise.checkpoints import SENTENCES, _save
from headwise.checkpoints._fresh_process import encode_sentences, sentence_class
from headwise.errors import ArgumentError, OutputError, UnsupportedError
from headwise.ownership import example_input
from headwise.recovery import recover
from headwise.scoring import Loss
from sentence_models import TEXTS, open_sentence_model, open_with_head, write_sentence_model
from tiers import tiers

GONE = {0: [1, 3], 1: [0]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sentences")
    write_sentence_model(place / "bert")
    write_sentence_model(place / "llama", kv_heads=4)
    return place


@pytest.fixture
def model(folders: Path) -> SentenceTransformer:
    return open_sentence_model(folders / "bert")


def test_watching_changes_no_bit_and_tables_are_those_of_the_transformer(
    model: SentenceTransformer, folders: Path
) -> None:
    before = model.encode(TEXTS)
    with hw.observe(model) as watch:
        assert np.array_equal(model.encode(TEXTS), before)
    inner, tokens = hw.load(folders / "bert"), model.preprocess(TEXTS)
    with hw.observe(inner) as on_inner, torch.no_grad():
        inner(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    table, theirs = watch.table(), on_inner.table()
    assert table.heads == theirs.heads
    np.testing.assert_allclose(table.mean("entropy"), theirs.mean("entropy"), rtol=1e-5)
    assert len((table + theirs).heads) == 8  # so they are tables of one model


def test_batches_measure_its_transformer(model: SentenceTransformer) -> None:
    texts = TEXTS[1:]
    row = hw.BatchObserver(model)({"text": texts})
    with hw.observe(model) as watch:
        model.encode(texts)
    entropy = hw.HeadTable.sum([row]).mean("entropy")
    np.testing.assert_allclose(entropy, watch.table().mean("entropy"), rtol=1e-5)


@pytest.mark.full
def test_scores_measure_the_sentence_embedding(model: SentenceTransformer) -> None:
    texts = TEXTS[1:]  # a text that is too long would be scored in pieces
    scores = hw.importance(model, texts, method="zero-ablation")
    assert scores.loss == "embedding"
    full = torch.tensor(model.encode(texts))
    for head, score in zip(scores.heads, scores.importance, strict=True):
        with hw.ablate(model, head):
            without = torch.tensor(model.encode(texts))
        assert score == pytest.approx(1 - (full * without).sum(1).mean().item(), abs=1e-6)
    assert scores.model == hw.costs(model).model


def test_batches_of_its_tokenizer_and_texts_give_the_same(model: SentenceTransformer) -> None:
    batch = model.preprocess(TEXTS[1:])
    assert batch["modality"] == "text"
    ready, tokenized = (hw.importance(model, inputs).importance for inputs in (batch, TEXTS[1:]))
    np.testing.assert_allclose(ready, tokenized, rtol=1e-4, atol=1e-7)
    small = hw.prune(model, GONE, fold="mean", reference=[batch])
    with hw.ablate(model, GONE, "mean", [batch]):
        expected = model.encode(TEXTS)
    np.testing.assert_allclose(small.encode(TEXTS), expected, atol=1e-5)


def test_the_pruned_model_encodes_like_the_ablated_one(model: SentenceTransformer) -> None:
    before = model.encode(TEXTS)
    small = hw.prune(model, hw.Plan.of(GONE, hw.costs(model).heads, hw.costs(model).model))
    assert type(small) is SentenceTransformer
    with hw.ablate(model, GONE):
        np.testing.assert_allclose(small.encode(TEXTS), model.encode(TEXTS), atol=1e-6)
    assert np.abs(small.encode(TEXTS) - before).max() > 1e-3
    assert np.array_equal(model.encode(TEXTS), before)
    assert small.prompts == model.prompts
    count = [sum(x.numel() for x in module.parameters()) for module in (small, model)]
    assert count[0] < count[1]


@pytest.mark.full
def test_a_pruned_sentence_model_recovers(model: SentenceTransformer) -> None:
    small = hw.prune(model, GONE)
    full, before = model.encode(TEXTS), small.encode(TEXTS)
    recover(small, model, TEXTS, steps=40, rate=3e-3)
    after = small.encode(TEXTS)
    assert (after * full).sum() > (before * full).sum()
    assert np.array_equal(model.encode(TEXTS), full)


def test_studies_use_its_tokenizer(model: SentenceTransformer) -> None:
    study = hw.study(model, TEXTS)
    assert study.text["longest piece"] == 6  # its own limit, not that of the transformer


# What each verb makes of a model, its tokenizer or None, and the inputs of a text.
Verb = Callable[[Any, Any, Any], Any]
EXAMPLES = [
    hw.Example("A man sleeps on The cat", (0, 1), [(2, 5)], [(n, n + 2)]) for n in range(16, 22, 2)
]
EVIDENCE = hw.Evidence(nulls=(), splits=1)
VERBS: dict[str, Verb] = {
    "ablate": lambda model, *_: hw.ablate(model, GONE).__enter__(),
    "attentions": lambda model, _, batch: torch.cat(hw.attentions(model, batch)).tolist(),
    "compare": lambda model, tokenizer, _: (
        hw.compare(model, model, TEXTS, tokenizer=tokenizer).frame().to_csv()
    ),
    "costs": lambda model, *_: str(hw.costs(model)),
    "find_heads": lambda model, tokenizer, _: (
        hw.find_heads(model, EXAMPLES, tokenizer=tokenizer, evidence=EVIDENCE).frame().to_csv()
    ),
    "find_roles": lambda model, tokenizer, _: (
        hw.find_roles(model, TEXTS * 3, tokenizer=tokenizer, evidence=EVIDENCE).frame().to_csv()
    ),
    "importance": lambda model, tokenizer, batch: (
        hw.importance(model, [batch], loss=_states).frame().to_csv()
    ),
    "links": lambda model, tokenizer, _: hw.links(
        model, TEXTS[1], "cat", "The", tokenizer=tokenizer
    ),
    "look": lambda model, tokenizer, _: vars(hw.look(model, TEXTS[1], tokenizer=tokenizer).sample),
    "monitor": lambda model, *_: hw.HeadMonitor(model).close(),
    "prune": lambda model, *_: hw.costs(hw.prune(model, GONE)).model,
    "recover": lambda model, _, batch: recover(
        hw.prune(model, GONE), model, [batch], steps=2
    ).tolist(),
    "study": lambda model, tokenizer, _: (
        hw.study(model, TEXTS, tokenizer=tokenizer).table.frame().to_csv()
    ),
}


def _states(output: Any, batch: Any) -> torch.Tensor:
    return next(iter(output.values())).flatten(1).square().mean(1)


@pytest.mark.parametrize("kind", tiers(["SentenceTransformer"], ["CrossEncoder", "SparseEncoder"]))
def test_every_verb_takes_the_transformer_in_a_model(
    kind: str, model: SentenceTransformer, folders: Path
) -> None:
    whole: Any = model if kind == "SentenceTransformer" else open_with_head(folders / "bert", kind)
    batch = {name: x for name, x in whole.preprocess(TEXTS[1:2]).items() if torch.is_tensor(x)}
    for name, verb in VERBS.items():
        ours, theirs = verb(whole, None, batch), verb(whole[0].model, whole.tokenizer, batch)
        assert str(ours) == str(theirs) or name in ("ablate", "monitor"), (kind, name)


@pytest.mark.parametrize("kind", ["CrossEncoder", "SparseEncoder"])
def test_models_with_a_head_are_pruned_and_saved_whole(
    kind: str, folders: Path, tmp_path: Path
) -> None:
    whole = open_with_head(folders / "bert", kind)
    small = hw.prune(whole, GONE)
    assert type(small) is type(whole)
    hw.save(small, tmp_path / "small", format="padded")  # compared in a fresh process
    opened = sentence_class(tmp_path / "small")(str(tmp_path / "small"), device="cpu")
    with hw.ablate(whole, GONE):
        torch.testing.assert_close(encode_sentences(opened), encode_sentences(whole))


def test_scores_measure_the_sparse_vectors(folders: Path) -> None:
    model, texts = open_with_head(folders / "bert", "SparseEncoder"), TEXTS[1:]
    scores = hw.importance(model, texts, method="zero-ablation")
    full = torch.nn.functional.normalize(model.encode(texts).to_dense())
    with hw.ablate(model, scores.heads[0]):
        without = torch.nn.functional.normalize(model.encode(texts).to_dense())
    expected = 1 - (full * without).sum(1).mean().item()
    assert scores.importance[0] == pytest.approx(expected, abs=1e-6)

    def pooled(output: Any, batch: Any) -> torch.Tensor:
        seen = output.logits.relu() * batch["attention_mask"][..., None]
        return torch.nn.functional.normalize(seen.log1p().amax(1), dim=-1)

    loss = Loss("by hand", pooled, compares=True)  # its own pooling works in place
    batch = {name: x for name, x in model.preprocess(texts).items() if torch.is_tensor(x)}
    by_hand = hw.importance(model[0].model, [batch], loss=loss)
    assert hw.importance(model, texts).importance == pytest.approx(by_hand.importance, abs=1e-6)


def test_a_padded_save_encodes_the_same(model: SentenceTransformer, tmp_path: Path) -> None:
    small = hw.prune(model, GONE)
    folder = hw.save(small, tmp_path / "small", format="padded")
    loaded = open_sentence_model(folder)
    np.testing.assert_allclose(loaded.encode(TEXTS), small.encode(TEXTS), atol=1e-6)
    assert loaded.max_seq_length == 6
    assert loaded.prompts == small.prompts
    assert [type(module) for module in loaded] == [type(module) for module in small]
    assert loaded.encode(TEXTS).shape == (4, 12)
    batch = example_input(hw.load(folder))
    with torch.no_grad():
        expected = small[0].model(**batch)[0]
        torch.testing.assert_close(hw.load(folder)(**batch)[0], expected)


def test_a_stock_save_encodes_the_same(folders: Path, tmp_path: Path) -> None:
    small = hw.prune(open_sentence_model(folders / "llama"), {0: [0, 1], 1: [1, 2]})
    loaded = open_sentence_model(hw.save(small, tmp_path / "small"))  # stock, since it fits
    np.testing.assert_allclose(loaded.encode(TEXTS), small.encode(TEXTS), atol=1e-6)
    assert loaded[0].model.config.num_attention_heads == 2


def test_a_headwise_save_loads_here_and_is_refused_elsewhere(
    model: SentenceTransformer, tmp_path: Path
) -> None:
    small = hw.prune(model, GONE)
    folder = hw.save(small, tmp_path / "small", format="headwise")
    batch = example_input(small[0].model)
    with torch.no_grad():
        assert torch.equal(hw.load(folder)(**batch)[0], small[0].model(**batch)[0])
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        open_sentence_model(folder)


def test_an_unavailable_format_is_refused(model: SentenceTransformer, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="stock Transformers needs the same number of heads"):
        hw.save(hw.prune(model, GONE), tmp_path / "small", format="stock")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("fresh")
def test_a_folder_whose_embeddings_differ_is_removed(
    model: SentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = hw.prune(model, GONE)
    monkeypatch.setattr(_save, "check_fresh", lambda *_: None)
    wrong = 4.7 * torch.tensor(small.encode([*SENTENCES]))
    monkeypatch.setattr(_save, "answer_in_fresh_process", lambda *_: [wrong])
    with pytest.raises(OutputError, match=r"open right in a fresh process \(off by"):
        hw.save(small, tmp_path / "small", format="padded")
    assert not any(tmp_path.iterdir())


def test_a_sentence_model_without_a_transformer(folders: Path) -> None:
    tokenizer = open_sentence_model(folders / "bert").tokenizer.backend_tokenizer
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)])
    with pytest.raises(UnsupportedError, match="prune: this SentenceTransformer of StaticEmb"):
        hw.prune(static, [(0, 0)])


@pytest.mark.parametrize("name", ["find_roles", "study"])
def test_other_models_have_no_tokenizer(name: str, folders: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: tokenizer=None, and BertModel has none"):
        getattr(hw, name)(hw.load(folders / "bert"), TEXTS)


def test_a_source_is_refused_for_a_sentence_model(
    model: SentenceTransformer, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match="source='here' for a SentenceTransformer"):
        hw.save(model, tmp_path / "small", source="here")


def test_an_unusual_embedding_is_refused(model: SentenceTransformer) -> None:
    first: Any = model[0]
    first.modality_config = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
    with pytest.raises(UnsupportedError, match="embeds 'pooler_output' of its transformer"):
        hw.importance(model, TEXTS)
