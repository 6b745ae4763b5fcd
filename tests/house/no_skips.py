"""A pytest plugin that forbids skips for reasons that an installation would remove.

CI loads it by name (`PYTEST_PLUGINS=no_skips`), so that a missing browser or package cannot
hide a test. A reason that begins with "needs a GPU" is let through; so is an expected failure.
"""

from collections.abc import Generator
from typing import TypeVar

import pytest

EXCUSE = "needs a GPU"

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge the skip of a test."""
    return _refuse((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge the skip of a whole file, as by `pytest.importorskip`."""
    return _refuse((yield))


def _refuse(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail"):
        path, line, reason = report.longrepr
        if not reason.removeprefix("Skipped: ").startswith(EXCUSE):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: {reason}, but nothing may be skipped here"
    return report
