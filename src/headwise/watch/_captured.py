"""Refuse a table of a watch that captured nothing, or not the layers it was asked for."""

from collections.abc import Collection

from torch import nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Site
from headwise.watch._recorder import Recorder


def check_captured(
    model: nn.Module,
    recorder: Recorder,
    layers: Collection[int] | None,
    watched: Collection[Site],
) -> None:
    """Refuse layers that do not exist, and a watch without a call.

    Raises:
        ArgumentError: `layers` names a layer that the model does not have.
        UnsupportedError: no attention call was captured.
    """
    sites = recorder.captured_sites()
    missing = set(layers or ()) - {site.layer for site in sites}
    if missing and sites:
        raise ArgumentError(
            f"observe: layers {sorted(missing)} do not exist. "
            f"There are 0 to {max(site.layer for site in sites)}."
        )
    if not watched:
        raise UnsupportedError(
            f"observe: no attention call was captured in {recorder.passes} forward passes of "
            f"{type(model).__name__}. {_advice(recorder)}"
        )


def _advice(recorder: Recorder) -> str:
    """What to do if nothing was captured: after a pass, which modules should have attended."""
    names = ", ".join(
        f"{site.name or 'the model'} ({site.watched})" for site in recorder.sites()[:4]
    )
    if not recorder.passes or not names:
        return "Run a model with softmax attention inside the block."
    return f"It cannot be watched: {names}."
