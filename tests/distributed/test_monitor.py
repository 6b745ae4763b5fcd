"""Two processes on halves of a batch report the statistics of one process on the whole."""

import json
from pathlib import Path

import pytest

from distributed import monitored
from headwise.monitor import HeadMonitor
from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(monitored.__file__)


def test_two_ranks_report_the_statistics_of_one_process(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run_ranks(SCRIPT, store)
    first, second = (json.loads(Path(f"{store}.{rank}.json").read_text()) for rank in range(2))
    assert first == second  # to the last bit: both have the same sums

    model = monitored.make_model()
    with HeadMonitor(model, 2, rules=monitored.RULES) as monitor:
        expected = []
        for batch in monitored.texts():
            model(batch)
            expected.append(monitor.step())
    assert [list(scalars) for scalars in first["scalars"]] == [
        list(scalars) for scalars in expected
    ]
    for ours, theirs in zip(first["scalars"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert first["alarms"] == [str(alarm) for alarm in monitor.alarms]
