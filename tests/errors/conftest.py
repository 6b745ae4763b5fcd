"""Shape checks of annotations are off, as for users, so that our own errors are tested."""

import pytest
from jaxtyping import config


@pytest.fixture(autouse=True)
def _no_annotation_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", True)
