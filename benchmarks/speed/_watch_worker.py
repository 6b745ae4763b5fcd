"""A process that times watched and unwatched passes with one version of this library.

`short_watch.py --beside SRC` runs two of them, and asks each for one measurement at a time, so that
versions are compared within a round. It imports the public interface alone.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import headwise as hw

LAYERS, HEADS, WIDTH = 6, 12, 384
# Texts and tokens of the encoder's batches.
BATCHES = {"1 x 32": (1, 32), "8 x 128": (8, 128), "2 x 512": (2, 512), "1 x 2048": (1, 2048)}
PROMPT, NEW, EVERY = 64, 32, 16
CASES = (*BATCHES, "generate", "one pass", f"every={EVERY}")
Work = Callable[[], Any]


def encoder(width: int = WIDTH) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * width,
        max_position_embeddings=2048, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def decoder() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=1024,
        vocab_size=1000, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _works(case: str, stack: ExitStack) -> dict[str, Work]:
    """What is timed in a case, without a watch and with one, which has seen a pass before.

    The two have models of their own, with the same weights.
    """
    torch.manual_seed(0)
    if case == "generate":
        plain, prompt = decoder(), torch.randint(0, 1000, (1, PROMPT))

        def run(model: Any) -> None:
            model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    else:
        plain, (B, T) = encoder(), BATCHES.get(case, (1, 32))
        batch, passes = torch.randint(0, 1000, (B, T)), max(1, 320 // (B * T))
        passes = {"one pass": 1, CASES[-1]: EVERY}.get(case, passes)

        def run(model: Any) -> None:
            for _ in range(passes):
                model(batch)

    def opened() -> None:
        with hw.observe(plain) as watch:
            run(plain)
            watch.table()

    if case == "one pass":
        return {"without": lambda: run(plain), "watched": opened}
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    every = EVERY if case == CASES[-1] else 1
    watch = stack.enter_context(hw.observe(model, every=every))

    def watched() -> None:
        run(model)
        if every == 1:
            watch.table()

    return {"without": lambda: run(plain), "watched": watched}


@torch.no_grad()
def serve() -> None:
    """Time what each line of the input names, and print the seconds of the processor."""
    torch.set_num_threads(1)
    case, works, stack = "", dict[str, Work](), ExitStack()
    for line in sys.stdin:
        wanted, way = json.loads(line)
        if wanted != case:
            stack.close()
            case, works = wanted, _works(wanted, stack)
            for work in works.values():
                work()
                work()
        started = time.process_time()
        works[way]()
        print(time.process_time() - started, flush=True)


class Workers:
    """A worker for each version, by its name."""

    def __init__(self, sources: dict[str, Path]) -> None:
        code = (
            "import sys; sys.path[:0] = sys.argv[1:]; "
            "from benchmarks.speed import _watch_worker as w; w.serve()"
        )
        here = str(Path(__file__).parents[2])
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", code, str(source), here],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for name, source in sources.items()
        }  # fmt: skip

    def seconds(self, version: str, case: str, way: str) -> float:
        process = self._processes[version]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([case, way]) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    def rounds(self, case: str, seconds: float) -> Iterator[dict[str, float]]:
        """The seconds of each version and way, round by round, in random order."""
        rng = random.Random(0)
        columns = [(version, way) for version in self._processes for way in ("without", "watched")]
        for version, way in columns:
            self.seconds(version, case, way)
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            order: Sequence[tuple[str, str]] = rng.sample(columns, len(columns))
            yield {f"{v} {way}": self.seconds(v, case, way) for v, way in order}

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()
