"""Two processes with QK-clip end with the weights of one, however the weights are sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import clipped
from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(clipped.__file__)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes says of each way of sharing the work."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    run_ranks(SCRIPT, store)
    return [torch.load(f"{store}.{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", clipped.WAYS)
def test_two_ranks_clip_as_one_process_does(way: str, ranks: list[dict[Any, Any]]) -> None:
    first, second = (rank[way] for rank in ranks)
    model = clipped.make_model()
    expected = clipped.train(model, [*clipped.texts()])
    assert all(0 < len(heads) < 8 for heads in expected)  # in each step some heads pass, not all
    for number, heads in enumerate(expected):
        if way == "tensor parallel":  # each rank has two heads of each layer, numbered from 0
            parts = [dict(part["clips"][number]) for part in (first, second)]
            clips = {
                f"{name[:-1]}{int(name[-1]) + 2 * rank}": factor
                for rank, part in enumerate(parts)
                for name, factor in part.items()
            }
        else:
            assert first["clips"] == second["clips"]
            clips = dict(first["clips"][number])
        assert clips == pytest.approx(dict(heads), rel=1e-5)
    for name, weight in model.state_dict().items():
        for part in (first, second):
            torch.testing.assert_close(part["weights"][name], weight, rtol=1e-5, atol=1e-7)
