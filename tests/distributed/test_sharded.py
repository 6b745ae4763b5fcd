"""Two and three processes with uneven shares give the counts and statistics of one process."""

from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from distributed import sharded
from headwise.models import fingerprint
from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(sharded.__file__)
WORLDS = (2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6,
        intermediate_size=36, vocab_size=13, head_dim=4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By the number of processes, what each of them says."""
    said = {}
    for world in WORLDS:
        store = folder / f"store{world}"
        run_ranks(SCRIPT, store, world)
        said[world] = [
            torch.load(f"{store}.{rank}.pt", weights_only=False) for rank in range(world)
        ]
    return said


@pytest.mark.parametrize("world", WORLDS)
def test_heads_of_a_tensor_parallel_model_have_their_global_numbers(
    world: int, folder: Path, results: dict[int, list[dict[str, Any]]]
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model").eval()
    known = sharded.table_of(model, sharded.texts(world))
    tables = [rank["tensor parallel"] for rank in results[world]]
    assert {table.model for table in tables} == {known.model}
    rows = [known.heads.index(head) for table in tables for head in table.heads]
    assert sorted(rows) == list(range(12))
    assert [kv for table in tables for kv in table.kv_heads] == known.kv_heads[rows].tolist()
    for name in known.statistics:
        count, mean = (
            np.concatenate([getattr(table, part)(name) for table in tables])
            for part in ("count", "mean")
        )
        np.testing.assert_array_equal(count, known.count(name)[rows])
        np.testing.assert_allclose(mean, known.mean(name)[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_monitor_reports_the_statistics_of_the_whole_batch(
    way: str, world: int, results: dict[int, list[dict[str, Any]]]
) -> None:
    expected = sharded.monitored(sharded.mini_gpt(), sharded.texts(world))
    for rank in results[world]:
        assert rank[way] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_tables_of_uneven_shares_add_up(
    world: int, results: dict[int, list[dict[str, Any]]]
) -> None:
    known = sharded.table_of(sharded.mini_gpt(), sharded.texts(world))
    table = reduce(add, [rank["observed"] for rank in results[world]])
    for name in known.statistics:
        np.testing.assert_array_equal(table.count(name), known.count(name))
        np.testing.assert_allclose(table.mean(name), known.mean(name), rtol=1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_sharded_weights_have_the_fingerprint_of_the_whole_model(
    world: int, results: dict[int, list[dict[str, Any]]]
) -> None:
    # All processes have trained with gradients of their own, but taken no step.
    assert {rank["fingerprint"] for rank in results[world]} == {fingerprint(sharded.mini_gpt())}


def test_a_layer_of_two_ranks_loads_on_three(results: dict[int, list[dict[str, Any]]]) -> None:
    known = sharded.layer_of(seed=0).state_dict()
    for rank in results[3]:
        assert rank["layer"].keys() == known.keys()
        assert all(torch.equal(rank["layer"][name], known[name]) for name in known)
