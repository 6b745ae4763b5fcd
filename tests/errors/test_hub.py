"""A hub that cannot be reached, or does not have the name, is reported at once."""

from types import SimpleNamespace

import huggingface_hub as hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from headwise.errors import InputError
from headwise.models import load

ANSWER = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Name or service not known"), r"bert-bose is neither.*Name or service not known"),
        (RepositoryNotFoundError("404 no such thing", response=ANSWER), "bert-bose.*404 no"),
    ],
)
def test_an_unreachable_name_is_refused_after_one_request(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def ask(url: str, **_: object) -> None:
        requests.append(url)
        raise error

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    with pytest.raises(InputError, match=message):
        load("bert-bose")
    assert len(requests) == 1


def test_a_busy_hub_is_left_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise HfHubHTTPError("503 come back", response=ANSWER)

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", busy)
    # The client itself is offline in tests, and raises its own error.
    with pytest.raises(InputError, match=r"bert-bose is neither a folder nor a reachable hub"):
        load("bert-bose")


def test_offline_no_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(hub, "get_hf_file_metadata", pytest.fail)
    with pytest.raises(InputError, match="bert-bose is neither"):
        load("bert-bose")
