"""Whatever a file contains, its loader gives a usable object or our error with the path."""

import json
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from loaders import KINDS
from small_files import TEXTS
from soak.fuzz import Guard, fuzz_kind

GUARD = Guard()


MEASURED = json.loads((Path(__file__).parents[1] / "soak/results/fuzz.json").read_text("utf-8"))


# A sample of `make soak`, whose page lists every loader.
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    fuzzers = {fuzzer.name: fuzzer for fuzzer in fuzz_kind(kind, tmp_path, 300, GUARD)}
    problems = {name: x.outcomes.problems for name, x in fuzzers.items() if x.outcomes.problems}
    assert not problems, problems
    assert fuzzers.keys() <= MEASURED.keys()
    counts = [fuzzer.outcomes for fuzzer in fuzzers.values()]
    assert sum(x.inputs for x in counts) == sum(x.loaded + x.refused for x in counts)
    assert sum(x.refused for x in counts) > sum(x.inputs for x in counts) // 10
    assert max(x.megabytes for x in counts) < 100


def test_the_guard_sees_what_a_loader_must_not_do(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    with GUARD(tmp_path / "inside"):
        (tmp_path / "inside" / "file").write_text("")
        (tmp_path / "outside").write_text("")
        exec(compile("1", str(tmp_path / "inside" / "code.py"), "exec"))
    assert [event.split()[0] for event in GUARD.events] == ["open", "exec"]
    assert "outside" in GUARD.events[0]


@pytest.mark.parametrize("name", ["conllu", "gap", "jsonl", "pairs", "texts"])
def test_a_line_of_many_megabytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"a" * 20_000_000)
    read = TEXTS[name][1]
    if name == "texts":
        assert len(read(path)[0]) == 20_000_000
        return
    with pytest.raises(HeadwiseError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["conllu", "gap", "jsonl", "pairs", "texts"])
def test_carriage_returns_change_nothing(name: str, tmp_path: Path) -> None:
    content, read = TEXTS[name]
    for ending in ("\n", "\r\n"):
        (tmp_path / repr(ending)).write_bytes(content.replace("\n", ending).encode())
    assert read(tmp_path / repr("\n")) == read(tmp_path / repr("\r\n"))
