"""What serving counts and refuses, without vLLM: positions, spans, options, lines and tables."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import (
    ArgumentError,
    HeadError,
    InputError,
    MissingPackageError,
    OutputError,
    UnsupportedError,
)
from headwise.kernels import pages
from headwise.tables import resolve_heads
from headwise.vllm import ServedWatch, register, spans, watch
from headwise.vllm._options import counted_positions, make_options, read_spans, server_options
from headwise.vllm._recorder import (
    Sent,
    _packed,
    line_writer,
    open_pages,
    why_no_layer,
    why_not_served,
)

DEFAULTS = (1, None, None, True)


@pytest.fixture(autouse=True)
def _no_annotation_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users, and for what a server reads from its environment."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("every", [1, 3, 16])
@pytest.mark.parametrize("steps", [[40], [16, 16, 8], [1] * 40, [33, 7]])
def test_a_query_counts_once_by_its_position_whatever_the_steps(
    every: int, steps: list[int]
) -> None:
    prompt, start = 34, 0
    by_phase: list[list[int]] = [[], []]
    for size in steps:
        parts = counted_positions(start, start + size, prompt, every)
        for positions, part in zip(by_phase, parts, strict=True):
            positions += part.tolist()
        start += size
    counted = [i for i in range(start) if i % every == 0 or i == prompt - 1]
    assert by_phase == [[i for i in counted if i < prompt], [i for i in counted if i >= prompt]]


def test_a_client_names_spans_that_the_worker_reads() -> None:
    given = spans(passage=(4, 90), question=(90, 101))
    stretches = {"passage": (4, 90), "question": (90, 101)}
    assert read_spans(given["headwise"], ["question", "passage"]) == stretches
    assert read_spans("", ["passage"]) == {}


@pytest.mark.parametrize(
    "text", ["passage", "passage=4", "passage=9:4", "other=1:2", "passage=1:2 passage=3:4", 7, {}]
)
def test_spans_that_cannot_be_read_are_refused_by_name(text: Any) -> None:
    shown = text.split()[-1] if isinstance(text, str) else repr(text)
    with pytest.raises(ArgumentError, match=shown):
        read_spans(text, ["passage"])
    with pytest.raises(ArgumentError, match="a b=1:2"):
        spans(**{"a b": (1, 2)})


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"statistics": ("entropy", "participation")}, "participation"),
        ({"classes": {"comma": [1]}}, "classes"),
        ({"relations": {"same": lambda ids: []}}, "relations"),
        ({"pairs": ("links",)}, "pairs"),
        ({"top": ("first",)}, "top"),
        ({"value": ("first",)}, "value"),
        ({"received": True}, "received"),
        ({"spans": ("a",), "per_query": True}, "per_query"),
        ({"maps": True}, "maps"),
        ({"queries": "all"}, "queries='all'"),
        ({"spans": tuple("abcde")}, "at most 4"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(request_: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        make_options(hw.Request(**request_), *DEFAULTS)


def test_invalid_arguments_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="request='entropy'"):
        make_options("entropy", *DEFAULTS)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="every=0"):
        make_options(None, 0, None, None, True)
    with pytest.raises(ArgumentError, match="layers=3"):
        make_options(None, 16, 3, None, True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'a=b'"):
        make_options(hw.Request(spans=("a=b",)), *DEFAULTS)
    with pytest.raises(MissingPackageError, match=r"headwise\[vllm\]"), watch(None):
        pass


@pytest.mark.parametrize(
    "heads", ["L5.H3", (5, 3), [(5, 3)], [[5, 3]], {5: [3]}, ["L5.H3"], hw.Head("", 5, 3)]
)
def test_heads_of_any_form_travel_as_plain_values(heads: Any) -> None:
    options = json.loads(json.dumps(make_options(None, 16, {1, 5}, heads, True)))
    assert resolve_heads(options["heads"], [hw.Head("", 5, 3)]) == [hw.Head("", 5, 3)]
    assert sorted(options["layers"]) == [1, 5]


def test_options_of_a_server_are_those_of_a_watch() -> None:
    text = '{"path": "heads.jsonl", "statistics": ["entropy"], "spans": ["passage"], "every": 4}'
    of_a_watch = make_options(hw.Request(("entropy",), spans=("passage",)), 4, None, None, True)
    assert server_options(text) == of_a_watch | {"path": "heads.jsonl"}
    with pytest.raises(InputError, match="'yes' is not JSON"):
        server_options("yes")
    for wrong, named in (
        ('{"path": "a", "evry": 4}', "evry=4"),
        ('["path"]', r'\["path"\]'),
        ("{}", "no path"),
        ('{"path": 3}', "path=3"),
        ('{"path": "a", "layers": 5}', "layers=5"),
    ):
        with pytest.raises(ArgumentError, match=named):
            server_options(wrong)


def test_the_entry_point_does_nothing_until_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from headwise.vllm import register; register(); print('torch' in sys.modules)"
    )
    environment = {name: x for name, x in os.environ.items() if name != "HEADWISE_VLLM"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    monkeypatch.setenv("HEADWISE_VLLM", "{}")
    with pytest.raises(ArgumentError, match="no path"):
        register()


def test_an_error_of_the_worker_keeps_its_type() -> None:
    error = _packed({"error": "HeadError", "message": "no head L9"}, np.zeros(0))
    with pytest.raises(HeadError, match="no head L9"):
        ServedWatch(hw.Request(), make_options(), lambda *_: error)


def _record(name: str, seed: int, problem: str = "") -> Sent:
    """A request with two heads, one statistic in both phases and one without decoded queries."""
    numbers = np.random.default_rng(seed)
    count = np.array([[[4.0, 4.0], [4.0, 4.0]], [[2.0, 0.0], [2.0, 0.0]]])  # phases heads columns
    total = numbers.random((2, 2, 2)) * (count > 0)
    maximum = np.where(count > 0, numbers.random((2, 2, 2)), np.nan)
    about = {
        "name": f"{name}-0123abcd", "request": name, "queries": [4, 2], "tokens": [10, 2],
        "problem": problem,
    }  # fmt: skip
    return about, np.stack([total, count, count / 2, maximum], -1)


TWO_HEADS = SimpleNamespace(about={"heads": ["L0.H1", "L1.H0"]}, statistics=("entropy", "previous"))


def test_a_line_is_json_whatever_a_stranger_calls_a_request(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    write = line_writer(str(path), TWO_HEADS)
    name = 'x", "y": 1}\n{"z": \u2028<script>'
    write(_record(name, 0))
    write(_record("b", 1, "spans: 'a' names no stretch"))
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert [line["request"] for line in lines] == [name, "b"]
    assert lines[1]["problem"].startswith("spans")
    _, sums = _record(name, 0)
    assert lines[0]["decode"].keys() == {"entropy"}  # no decoded query had a previous token
    assert lines[0]["prefill"]["previous"]["L1.H0"] == pytest.approx(sums[0, 1, 1, 0] / 4, abs=1e-5)
    assert path.stat().st_mode & 0o077 == 0


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path, tmp_path / "link", tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(OutputError, match=str(path)):
            line_writer(str(path), TWO_HEADS)
    assert not (tmp_path / "target").exists()


def test_a_full_disk_loses_lines_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "heads.jsonl"
    write = line_writer(str(path), TWO_HEADS)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        write(_record("a", 0))
        write(_record("b", 1))
    write(_record("c", 2))
    write(_record("d", 3))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(line["request"], line.get("lost")) for line in lines] == [("c", 2), ("d", None)]


def _served(records: list[Sent], request: hw.Request) -> ServedWatch:
    about = {"heads": ["L0.H1", "L1.H0"], "kv_heads": [0, 0], "model": "m", "vllm": "0.32.0"}
    about |= {"requests": [about for about, _ in records]}
    data = _packed(about, np.array([sums for _, sums in records]))
    return ServedWatch(request, make_options(request, 4), lambda *_: data)


def test_tables_of_requests_and_phases_add_up() -> None:
    request = hw.Request(("entropy", "previous", "next", "sink"))
    served = _served([_record("a", 0), _record("b", 1)], request)
    whole = served.table()
    assert served.requests == ["a", "b"]
    assert [str(head) for head in whole.heads] == ["L0.H1", "L1.H0"]
    for parts in (
        [served.table("a"), served.table("b")],
        [served.table(phase="prefill"), served.table(phase="decode")],
    ):
        added = parts[0] + parts[1]
        for name in ("entropy", "previous"):
            np.testing.assert_allclose(added.mean(name), whole.mean(name))
            np.testing.assert_allclose(added.maximum(name), whole.maximum(name))
            np.testing.assert_allclose(added.uniform(name), whole.uniform(name))
    assert whole.coverage.tolist() == [0.5, 0.5]
    assert whole.count("entropy").tolist() == [12, 12]
    assert np.isnan(whole.mean("next")).all()
    assert whole.totals["entropy"].texts.tolist() == [2, 2]
    assert _served([_record("a", 0)], replace(request, per_text=True)).table().per_text(
        "entropy"
    ).count.tolist() == [[6, 6]]


def test_tables_that_do_not_exist_are_refused_by_name() -> None:
    served = _served(
        [_record("a", 0, "spans: 'x' names no stretch")], hw.Request(("entropy", "previous"))
    )
    with pytest.raises(ArgumentError, match=r"request='z'\. There are a"):
        served.table("z")
    with pytest.raises(ArgumentError, match="phase='both'"):
        served.table(phase="both")
    with pytest.raises(ArgumentError, match="'x' names no stretch"):
        served.table("a")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "0.31.2"}, r"0\.31\.2 was not tested"),
        ({"device_config.device_type": "cuda"}, "on a CPU"),
        ({"parallel_config.world_size": 2}, "split over several processes"),
        ({"parallel_config.data_parallel_size": 2}, "split over several processes"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config.decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": "ngram"}, "speculative decoding"),
        ({"model_config.use_mla": True}, "MLA"),
        ({"cache_config.cache_dtype": "fp8_e4m3"}, "fp8"),
        ({"cache_config.kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"runner": SimpleNamespace()}, "runner V2"),
    ],
)
def test_an_engine_that_cannot_be_watched_exactly_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    parallel = "world_size data_parallel_size prefill_context_parallel_size"
    parallel += " decode_context_parallel_size"
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**dict.fromkeys(parallel.split(), 1)),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(use_mla=False),
        speculative_config=None,
    )
    parts = {"version": "0.32.0", "runner": SimpleNamespace(requests={}, input_batch=None)}
    assert why_not_served(parts["version"], config, parts["runner"]) is None
    for path, value in change.items():
        *folders, name = path.split(".")
        if path in parts:
            parts[path] = value
        else:
            setattr(getattr(config, folders[0]) if folders else config, name, value)
    assert re.search(named, why_not_served(parts["version"], config, parts["runner"]) or "")


@pytest.mark.parametrize(
    ("of_impl", "of_layer", "named"),
    [
        ({"alibi_slopes": [1.0]}, {}, "ALiBi"),
        ({"sinks": [1.0]}, {}, "sinks"),
        ({"attn_type": "encoder_only"}, {}, "no decoder"),
        ({"forward": None}, {}, "watched already"),
        ({}, {"use_mm_prefix": True}, "both directions"),
    ],
)
def test_a_layer_that_cannot_be_watched_exactly_is_refused_by_name(
    of_impl: dict[str, Any], of_layer: dict[str, Any], named: str
) -> None:
    kind = type("CPUAttentionBackendImpl", (SimpleNamespace,), {})
    plain = {"alibi_slopes": None, "sinks": None, "attn_type": "decoder"}
    assert why_no_layer(SimpleNamespace(impl=kind(**plain), isa="vec"), True) is None
    layer = SimpleNamespace(**{"impl": kind(**plain | of_impl), "isa": "vec"} | of_layer)
    assert named in (why_no_layer(layer, True) or "")
    assert "not plain attention" in (why_no_layer(layer, False) or "")
    other = SimpleNamespace(impl=SimpleNamespace(**plain), isa="vec")
    assert "not vLLM's CPU backend" in (why_no_layer(other, True) or "")


@pytest.mark.skipif(not pages.library(), reason="no native kernel")
def test_pages_that_do_not_read_back_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function is replaced by one that writes keys as its layout says, or otherwise."""
    impl = SimpleNamespace(scale=0.5, logits_soft_cap=0.0, sliding_window=-1)
    backend = SimpleNamespace(get_supported_head_sizes=lambda: [32, 64])
    layer = SimpleNamespace(
        layer_name="layers.3", isa="vec", num_heads=4, head_size=32, impl=impl,
        attn_backend=backend, kv_cache=torch.zeros(5, 2, 32, 64),
    )  # fmt: skip
    is_transposed = True

    def write(
        keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any
    ) -> None:
        padded = torch.zeros(2, 32, *keys.shape[1:])
        padded.view(64, *keys.shape[1:])[: len(keys)] = keys
        laid = padded.permute(0, 2, 3, 1) if is_transposed else padded.transpose(1, 2)
        key_cache.copy_(laid.reshape(key_cache.shape))

    operators = SimpleNamespace(cpu_attn_reshape_and_cache=write)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=operators))
    assert open_pages(layer).H == 4
    is_transposed = False
    with pytest.raises(UnsupportedError, match=r"layers\.3: .* 'vec' .* sum .* is -?\d.*, not"):
        open_pages(layer)
    layer.head_size = 48
    with pytest.raises(UnsupportedError, match=r"width 48 and a cache of 4 .* \[32, 64\]"):
        open_pages(layer)
