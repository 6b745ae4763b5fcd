"""Each refusal of the report names what is wrong, and leaves no files."""

from dataclasses import replace
from pathlib import Path

import pytest

from headwise.errors import ArgumentError, OutputError
from studies import make_roles, make_study


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.html.gz"])
def test_a_page_ends_in_html(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} does not end in \.html"):
        make_study().report(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/page\.html cannot be written"):
        make_study().report(tmp_path / "nowhere" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(OutputError, match=r"page\.html is a folder"):
        make_study().report(tmp_path / "page.html")


def test_roles_of_another_model() -> None:
    study = make_study()
    roles = replace(make_roles(study), model="another")
    with pytest.raises(
        ArgumentError, match=r"Study: the roles belong to the model another, the stud"
    ):
        study.with_roles(roles)
