"""Texts packed into one row of a Hugging Face model are the texts one by one."""

import numpy as np
import pytest
import torch
import zoo

from headwise.tables import HeadTable
from headwise.watch import Request, observe

TEXTS = [[5, 9, 7, 3, 11], [4, 6], [8, 10, 3, 3, 12, 9], [7]]


def _copies(ids: list[int]) -> list[tuple[int, int]]:
    return [(q, k) for q in range(len(ids)) for k in range(len(ids)) if q != k and ids[q] == ids[k]]


REQUEST = Request(
    statistics=(*Request().statistics, "participation"),
    classes={"threes": {3}}, relations={"copy": _copies},
    top=("first", "threes"), value=("copy",), per_text=True,
)  # fmt: skip


def _watched(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> HeadTable:
    with torch.no_grad(), observe(model, REQUEST) as watch:
        for batch in batches:
            model(**batch)
    return watch.table()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Qwen3"])
def test_packed_texts_give_the_table_of_texts_one_by_one(name: str) -> None:
    model = zoo.make(name).double()
    flat = torch.tensor([[token for text in TEXTS for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in TEXTS])[None]
    packed = _watched(model, [{"input_ids": flat, "position_ids": positions, "use_cache": False}])
    single = _watched(model, [{"input_ids": torch.tensor([text])} for text in TEXTS])
    for name in single.statistics:
        for ours, known in zip(
            packed.per_text(name).parts, single.per_text(name).parts, strict=True
        ):
            np.testing.assert_allclose(ours, known, rtol=1e-6, atol=1e-9, err_msg=name)
        maximum = single.maximum(name)
        np.testing.assert_allclose(packed.maximum(name), maximum, rtol=1e-6, err_msg=name)
    assert packed.per_text("lse").count[:, 0].tolist() == [5, 2, 6, 1]


def test_packed_texts_the_model_mixes_count_as_one() -> None:
    # With a cache, positions do not mark the beginnings of texts.
    model = zoo.make("Llama").double()
    batch = {
        "input_ids": torch.tensor([[5, 9, 7, 3]]),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }
    table = _watched(model, [batch | {"use_cache": True}])
    assert table.per_text("lse").count[:, 0].tolist() == [4]
