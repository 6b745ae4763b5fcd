"""Settings that every test shares: repeatable draws, one thread per worker."""

# ruff: noqa: E402
import gc

gc.disable()  # until all is imported and collected: a fifth of that time

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# isort: off
import runtime_checks  # before headwise, whose functions it has checked

# isort: on
from headwise import _native_library
from headwise._native_library import SETS, library, open_library
from headwise.checkpoints import _save
from headwise.kernels import cpu

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU, Triton kernels are interpreted; this must be set before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """The quick tier leaves types to the static type checker, and checks shapes."""
    if config.option.markexpr == "not full":
        runtime_checks.check_axes_alone()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the collector need not visit it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    runtime_checks.check_again()


@pytest.fixture(autouse=True, scope="session")
def _without_amx() -> Iterator[None]:
    """Kernels are chosen as on a CPU without AMX; the tests of AMX say that they have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "HAS_AMX", False)
        yield


_CHECKS = {name: getattr(_save, name) for name in ("check_fresh", "check_encoding")}


@pytest.fixture(autouse=True, scope="session")
def _saved_without_checks() -> Iterator[None]:
    """A saved folder is not opened in a fresh process, which takes seconds each time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _CHECKS:
            patch.setattr(_save, name, lambda *_: None)
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved folder is opened in a fresh process, as it is for users."""
    for name, check in _CHECKS.items():
        monkeypatch.setattr(_save, name, check)


# The one native build that is named, or all builds for this processor.
NAMED = os.environ.get(_native_library.SWITCH)
RUNS = [NAMED] if NAMED else [n for n in SETS if open_library(_native_library.BUILT / f"{n}.so")]
RUNS.sort(key=lambda name: name != library().name)  # the one that is used comes first


def _first_at_once(names: list[str]) -> list[Any]:
    """The build that is used in the quick tier, the others in the full tier."""
    return [*names[:1], *(pytest.param(name, marks=pytest.mark.full) for name in names[1:])]


_ONE_OF_TWO = {"avx512": "avx512bf16", "avx512bf16": "avx512"}


@pytest.fixture(
    params=_first_at_once([n for n in RUNS if _ONE_OF_TWO.get(n) not in RUNS[: RUNS.index(n)]])
)
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the native kernel's shared objects that this processor runs.

    Of two that differ in half precisions only, one.
    """
    yield from _picked(request.param)


@pytest.fixture(params=_first_at_once(RUNS))
def built_for_halves(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the native kernel's shared objects that this processor runs."""
    yield from _picked(request.param)


def _picked(name: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_native_library.SWITCH, name)
        library.cache_clear()
        yield name
    library.cache_clear()
