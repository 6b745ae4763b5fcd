"""Tables of served requests are those of `observe` on the same tokens, and answers stay."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_models import generate, make, observed, prompts, read, serve, tokens

import headwise as hw
from headwise.errors import ArgumentError, HeadError, UnsupportedError
from headwise.vllm import spans, watch

SPAN = (3, 9)
REQUEST = hw.Request(spans=("passage",))
MASSES = ("entropy", "max_weight", "first", "self", "previous", "passage")
# Logits and distances are larger numbers in float32.
TOLERANCES = dict.fromkeys(MASSES, 1e-5) | {"max_logit": 1e-4, "lse": 1e-4, "distance": 1e-3}


@pytest.fixture(params=["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(request.param, tmp_path)


@pytest.fixture
def engines() -> Iterator[Any]:
    """Makes engines, and ends each before the next: a process has one."""
    opened: list[Any] = []

    def open_engine(*args: Any, **options: Any) -> Any:
        opened.append(serve(*args, **options))
        return opened[-1]

    yield open_engine
    for llm in opened:
        llm.llm_engine.engine_core.shutdown()


def check_equal(served: hw.HeadTable, expected: hw.HeadTable) -> None:
    assert served.heads == expected.heads
    assert served.kv_heads.tolist() == expected.kv_heads.tolist()
    for name in expected.statistics:
        np.testing.assert_array_equal(served.count(name), expected.count(name), name)
        atol = TOLERANCES.get(name, 0.0)
        for part in ("mean", "uniform", "maximum"):
            ours, theirs = getattr(served, part)(name), getattr(expected, part)(name)
            most = 10 * atol if part == "maximum" else atol
            np.testing.assert_allclose(ours, theirs, atol=most, rtol=0, err_msg=f"{part} {name}")


def check_watched(
    llm: Any, folder: Path, texts: list[list[int]]
) -> tuple[Any, list[Any], hw.HeadTable]:
    """Answers stay, and tables equal those of `observe`.

    Returns:
        The watch, the outputs, and the table of `observe`.
    """
    plain = tokens(generate(llm, texts))
    with watch(llm, REQUEST, every=1) as served:
        outputs = generate(llm, texts, **spans(passage=SPAN))
    assert tokens(outputs) == plain
    expected = observed(folder, [read(output) for output in outputs], SPAN)
    check_equal(served.table(), expected)
    return served, outputs, expected


@pytest.mark.parametrize("chunk", [512, 64])
def test_tables_equal_those_of_observe(folder: Path, chunk: int, engines: Any) -> None:
    llm = engines(folder, max_num_batched_tokens=chunk, max_num_seqs=8)
    texts = prompts(40, 97, 200, 33)
    served, outputs, expected = check_watched(llm, folder, texts)
    assert served.table().coverage.tolist() == [1.0] * 12
    check_equal(served.table(outputs[1].request_id, "prefill"), observed(folder, texts[1:2], SPAN))
    with watch(llm, REQUEST, every=1, exact=False) as answered:
        generate(llm, texts, **spans(passage=SPAN))
    check_equal(answered.table(), expected)
    assert tokens(generate(llm, texts)) == tokens(outputs)


def test_a_compiled_model_is_watched(tmp_path: Path, engines: Any) -> None:
    folder = make("llama", tmp_path)
    llm = engines(folder, enforce_eager=False)
    assert llm.llm_engine.vllm_config.compilation_config.mode  # 0 is no compilation
    check_watched(llm, folder, prompts(40, 97))


def test_preemption_counts_a_query_once(tmp_path: Path, engines: Any) -> None:
    folder = make("mistral", tmp_path)
    llm = engines(folder, num_gpu_blocks_override=9, block_size=32, max_model_len=128)
    texts = prompts(30, 40, 50, 60)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *a, **k: (preempted.append(a), preempt(*a, **k))[1]
    with watch(llm, REQUEST, every=1) as served:
        outputs = generate(llm, texts, 60, **spans(passage=SPAN))
    assert preempted
    check_equal(served.table(), observed(folder, [read(o) for o in outputs], SPAN))


def test_rows_of_a_prefix_cache_lower_the_coverage(tmp_path: Path, engines: Any) -> None:
    folder = make("llama", tmp_path)
    llm = engines(folder, enable_prefix_caching=True, block_size=32)
    text = prompts(100)[0]
    with watch(llm, REQUEST, every=1) as served:
        outputs = [generate(llm, [text], 3, **spans(passage=SPAN))[0] for _ in range(2)]
    first, second = (served.table(output.request_id) for output in outputs)
    assert first.coverage.tolist() == [1.0] * 12
    assert np.allclose(second.coverage, (102 - 96) / 102)
    assert second.count("lse").tolist() == [6] * 12


def test_every_counts_positions_and_heads_choose_rows(tmp_path: Path, engines: Any) -> None:
    folder = make("llama", tmp_path)
    llm = engines(folder)
    texts = prompts(40, 97)
    chosen = ["L1.H2", "L0.H3"]
    with watch(llm, REQUEST, heads=chosen) as served:
        generate(llm, texts, **spans(passage=SPAN))
    table = served.table()
    assert [str(head) for head in table.heads] == ["L0.H3", "L1.H2"]
    positions = [i for n in (40, 97) for i in range(n + 19) if i % 16 == 0 or i == n - 1]
    assert table.count("lse").tolist() == [len(positions)] * 2
    with watch(llm, REQUEST, layers=[2]) as served:
        generate(llm, texts, **spans(passage=SPAN))
    assert {head.layer for head in served.table().heads} == {2}
    for options, error, message in (
        ({"heads": "L9.H0"}, HeadError, "L9.H0"),
        ({"layers": [7]}, ArgumentError, r"\[7\]"),
    ):
        with pytest.raises(error, match=message), watch(llm, **options):
            pass


def test_a_watch_leaves_every_object_of_vllm_as_it_was(tmp_path: Path, engines: Any) -> None:
    """Installed and off, or ended: classes, layers, implementations and worker are the same."""
    llm = engines(make("llama", tmp_path))
    before = llm.collective_rpc(state)[0]
    with watch(llm):
        assert llm.collective_rpc(state)[0] != before
        with pytest.raises(UnsupportedError, match="watched already"), watch(llm):
            pass
    assert llm.collective_rpc(state)[0] == before


def state(wrapper: Any) -> list[tuple[str, str, int]]:
    """The identity of every attribute of what serves attention."""
    import sys

    worker = wrapper.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    holders = {"wrapper": wrapper, "worker": worker, "runner": worker.model_runner}
    for name, layer in layers.items():
        holders |= {name: layer, f"{name}.impl": layer.impl}
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.v1", "vllm.model_executor.layers.attention")):
            holders[name] = module
            for key, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name:
                    holders[f"{name}.{key}"] = value
    return sorted(
        (holder, key, id(value))
        for holder, item in holders.items()
        for key, value in list(vars(item).items())
        if callable(value)
    )


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_greedy_tokens_in_bfloat16_stay(case: str, tmp_path: Path, engines: Any) -> None:
    llm = engines(make(case, tmp_path), "bfloat16")
    texts = prompts(40, 97, 200)
    plain = tokens(generate(llm, texts))
    with watch(llm, every=1) as served:
        assert tokens(generate(llm, texts)) == plain
    assert (served.table().mean("entropy") > 0).all()


def test_a_cache_of_fp8_is_refused(tmp_path: Path, engines: Any) -> None:
    folder = make("llama", tmp_path)
    llm = engines(folder, "bfloat16", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(UnsupportedError, match="fp8"), watch(llm):
        pass


def test_the_code_of_the_page_runs(tmp_path: Path, engines: Any) -> None:
    page = Path(__file__).parents[2].joinpath("docs/serving.md").read_text("utf-8")
    [code] = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # A small model in place of the one that has to be downloaded, which reads token ids.
    for theirs, ours in (
        ('LLM("Qwen/Qwen3-0.6B"', "engine(folder, max_model_len=1024"),
        ("SamplingParams(", "SamplingParams(detokenize=False, "),
    ):
        assert theirs in code
        code = code.replace(theirs, ours)
    given = [{"prompt_token_ids": text} for text in prompts(901, 950)]
    names = {"engine": engines, "folder": make("qwen3", tmp_path), "prompts": given}
    exec(code, names)  # the page is ours
    frame = names["served"].table(names["outputs"][0].request_id, phase="decode").frame()
    assert frame["entropy"].notna().all()
    assert frame["passage"].between(0, 1).all()
