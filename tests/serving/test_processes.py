"""An engine in a process of its own, and a server that is started, asked and stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from served_models import make, observed, prompts
from test_tables import check_equal

import headwise as hw

WATCHED = """
import sys
from served_models import generate, prompts, read, serve
import json

import headwise as hw
from headwise.vllm import spans, watch

if __name__ == "__main__":
    llm = serve(sys.argv[1], worker_extension_cls="headwise.vllm.WorkerCalls")
    with watch(llm, hw.Request(spans=("passage",)), every=1) as served:
        outputs = generate(llm, prompts(40, 97), **spans(passage=(3, 9)))
    served.table().save(sys.argv[2])
    print("READ", json.dumps([read(output) for output in outputs]))
"""


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | more


def test_an_engine_in_its_own_process_sends_arrays(tmp_path: Path) -> None:
    folder, script = make("llama", tmp_path), tmp_path / "watched.py"
    script.write_text(WATCHED, "utf-8")
    command = [sys.executable, str(script), str(folder), str(tmp_path / "table.parquet")]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    texts = json.loads(done.stdout.partition("READ ")[2])
    table = hw.HeadTable.load(tmp_path / "table.parquet")
    check_equal(table, observed(folder, texts, (3, 9)))


def test_a_server_writes_a_line_when_a_request_ends(tmp_path: Path) -> None:
    folder, lines = make("llama", tmp_path), tmp_path / "heads.jsonl"
    options = {"path": str(lines), "every": 1, "spans": ["passage"], "heads": ["L0.H1", "L2.H3"]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "512", "--gpu-memory-utilization", "0.2",
        "--served-model-name", "small",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=_environment(HEADWISE_VLLM=json.dumps(options)), stdout=out, stderr=out
        )
    try:
        _wait(lambda: _ask(port, "/health", None) is not None, server, log, 240)
        text = prompts(50)[0]
        for number, given in enumerate(("passage=3:9", "nonsense")):
            body = {
                "model": "small", "prompt": text, "max_tokens": 5, "temperature": 0,
                "ignore_eos": True, "request_id": f'client"{number}', "return_token_ids": True,
                "detokenize": False, "vllm_xargs": {"headwise": given},
            }  # fmt: skip
            assert _ask(port, "/v1/completions", body) is not None, log.read_text()[-3000:]
        _wait(lambda: lines.exists() and lines.read_text().count("\n") == 2, server, log, 20)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    first, second = map(json.loads, lines.read_text().splitlines())
    assert 'client"0' in first["request"]
    assert "nonsense" in second["problem"]
    assert first["tokens"] == first["queries"] == [50, 4]
    expected = observed(folder, [text], (3, 9))
    for name in ("L0.H1", "L2.H3"):
        for statistic in ("entropy", "passage"):
            found = first["prefill"][statistic][name]
            assert found == pytest.approx(expected.mean(statistic)[expected.row(name)], abs=2e-5)


def _ask(port: int, path: str, body: Any) -> Any:
    """The answer of the server; None while it has none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except OSError:
        return None


def _wait(ready: Any, server: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.5)
