"""A pruned or grouped model and its tables know which of the original heads it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn

from headwise import (
    Evidence,
    HeadTable,
    MultiHeadAttention,
    Roles,
    Scores,
    find_roles,
    group_heads,
    importance,
    load,
    observe,
    prune,
    save,
)
from headwise.errors import InputError
from headwise.lab import MiniGPT, MiniGPTConfig
from planted import TOKENIZER, lines

IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
GONE = {0: [0, 1], 1: [2, 3]}
LEFT = ["L0.H2", "L0.H3", "L1.H0", "L1.H1"]


def _table(model: nn.Module, **inputs: Any) -> HeadTable:
    with observe(model) as watch, torch.no_grad():
        model(**(inputs or {"input_ids": IDS}))
    return watch.table()


def _original(model: nn.Module) -> list[str]:
    return _table(model).frame()["original"].tolist()


def test_the_table_of_an_unpruned_model_has_no_original_column() -> None:
    table = _table(zoo.make("Llama"))
    assert table.original == ()
    assert "original" not in table.frame()


def test_pruning_a_pruned_model_composes() -> None:
    small = prune(zoo.make("Llama"), GONE)
    assert _original(small) == LEFT
    assert _original(prune(small, {0: [0]}, expand=True)) == ["L0.H3", "L1.H0", "L1.H1"]
    assert _original(small) == LEFT


def test_statistics_equal_those_of_the_original_heads() -> None:
    model = zoo.make("Llama")
    small, whole = _table(prune(model, {0: [0, 1]})), _table(model)
    for head, was in zip(small.heads, small.original, strict=True):
        if head.layer == 0:  # later layers read something else
            actual, expected = (
                t.mean("entropy")[t.row(h)] for t, h in ((small, head), (whole, was))
            )
            assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("format", ["headwise", "stock", "padded", "remote-code"])
def test_every_format_records_the_original_heads(format: Any, tmp_path: Path) -> None:
    small = prune(zoo.make("Llama"), GONE)
    folder = save(small, tmp_path / "small", format=format)
    original = _original(load(folder)) if format != "remote-code" else None
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if format == "padded":
        assert config["original_heads"] == {"L0": [2, 3, None, None], "L1": [0, 1, None, None]}
        assert original == [*LEFT[:2], "", "", *LEFT[2:], "", ""]
    else:
        assert config["original_heads"] == {"L0": [2, 3], "L1": [0, 1]}
        assert original in (LEFT, None)


def test_padded_heads_have_no_original(tmp_path: Path) -> None:
    padded = load(save(prune(zoo.make("Llama"), GONE), tmp_path / "small", format="padded"))
    assert _original(prune(padded, {0: [2, 3], 1: [0, 1]})) == ["L0.H2", "L0.H3", "", ""]


def test_a_llama_written_as_a_mistral_records_the_original_heads(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=23,
        intermediate_size=16, max_position_embeddings=40,
    )  # fmt: skip
    small = prune(transformers.LlamaForCausalLM(config).eval(), {0: [1], 1: [2]})
    loaded = load(save(small, tmp_path / "small", format="stock"))
    assert type(loaded) is transformers.MistralForCausalLM
    assert _original(loaded) == ["L0.H0", "L0.H2", "L0.H3", "L1.H0", "L1.H1", "L1.H3"]


def test_a_mini_gpt_records_the_original_heads(tmp_path: Path) -> None:
    small = prune(MiniGPT(MiniGPTConfig(23, 8, 12, 4, n_layers=2)).eval(), {0: [1]})
    loaded = load(save(small, tmp_path / "small"))
    assert loaded.original_heads == {"L0": [0, 2, 3], "L1": [0, 1, 2, 3]}


def test_a_layer_records_the_original_heads(tmp_path: Path) -> None:
    small = prune(prune(MultiHeadAttention(12, 4), [(0, 1)]), [(0, 0)])
    loaded = load(save(small, tmp_path / "small"))
    assert loaded.original_heads == {"L0": [2, 3]}


def test_grouped_heads_record_their_new_order() -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=6, vocab_size=23,
        intermediate_size=16, max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():  # heads 0 and 5, 1 and 3, 2 and 4 share keys and values
        for source, target in ((0, 5), (1, 3), (2, 4)):
            for part in (attention.k_proj, attention.v_proj):
                part.weight[4 * target : 4 * target + 4] = part.weight[4 * source : 4 * source + 4]
    small = group_heads(model, 3)
    original = _original(small)
    assert [{*original[start : start + 2]} for start in (0, 2, 4)] == [
        {"L0.H0", "L0.H5"}, {"L0.H1", "L0.H3"}, {"L0.H2", "L0.H4"},
    ]  # fmt: skip
    whole, pruned_table = _table(model), _table(small)
    for row, head in enumerate(pruned_table.original):
        assert pruned_table.mean("entropy")[row] == pytest.approx(
            whole.mean("entropy")[whole.row(head)], rel=1e-4
        )
    remaining = _original(prune(small, {0: [0, 1]}))
    assert remaining == original[2:]


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_tables_keep_the_original_heads_in_files(ending: str, tmp_path: Path) -> None:
    table = _table(prune(zoo.make("Llama"), GONE))
    loaded = HeadTable.load(table.save(tmp_path / f"table.{ending}"))
    assert loaded.original == table.original
    assert (loaded + table).frame()["original"].tolist() == LEFT


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_scores_keep_the_original_heads_in_files(ending: str, tmp_path: Path) -> None:
    small = prune(zoo.make("Llama"), GONE)
    scores = importance(small, [{"input_ids": IDS}])
    assert scores.frame()["original"].tolist() == LEFT
    loaded = Scores.load(scores.save(tmp_path / f"scores.{ending}"))
    assert loaded.original == scores.original
    assert importance(zoo.make("Llama"), [{"input_ids": IDS}]).original == ()


def test_roles_keep_the_original_heads_in_files(tmp_path: Path) -> None:
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(size, n_layers=2, n_heads=4, d_model=16, context=48))
    small = prune(model, GONE)
    roles = find_roles(small, TOKENIZER, lines(8), evidence=Evidence(()))
    found = roles.frame().drop_duplicates("name")
    assert found["original"].tolist() == LEFT
    for ending in ("csv", "json", "parquet"):
        loaded = Roles.load(roles.save(tmp_path / f"roles.{ending}"))
        assert loaded.frame()["original"].tolist() == roles.frame()["original"].tolist()


@pytest.mark.parametrize("wrong", [[0, 0], [-1], ["0"], 3, [True]])
def test_impossible_original_heads_are_refused(wrong: Any, tmp_path: Path) -> None:
    folder = save(prune(zoo.make("Llama"), GONE), tmp_path / "small")
    path = folder / "config.json"
    content = json.loads(path.read_text("utf-8"))
    content["original_heads"]["L1"] = wrong
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(InputError, match=r"gives L1 the original heads .*Save the model again"):
        load(folder)


def test_an_empty_folder_may_be_written_into(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    folder = save(prune(zoo.make("Llama"), GONE), tmp_path / "small")
    assert _original(load(folder)) == LEFT
