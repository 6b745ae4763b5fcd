"""What a corpus job costs for a large model, from one layer of its shape on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.scale --into benchmarks/results/corpus-jobs.md

Measured: a pass of one decoder layer of a 70B model's shape, plain and watched, and its share of
the core's fastest matrix product; the times to write a shard's table and to merge it. The rest of
the model is scaled by its number of layers.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software
from benchmarks._timing import interleaved
from headwise.tables import Head, HeadTable, Totals
from headwise.watch import DEFAULT

HOUR = 3600.0
TOKENS = 1e9  # of the corpus
LAYERS, VOCABULARY = 80, 128256  # of Llama 3 70B
HEADS = LAYERS * 64
SHAPE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the measured text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layer = measure_layer(options.tokens, options.rounds)
    writing, merging, size = measure_reduction()
    text = (
        f"{layer.report()}\n\nMeasured on {cpu_name()} ({software()}): the table of {HEADS:,} "
        f"heads and {len(DEFAULT)} statistics has {size / 1e6:.1f} MB; it is written in "
        f"{writing:.2f} s, and read and added in {merging:.2f} s of one core."
    )
    show(text, options.into, "scale")


@dataclass(frozen=True)
class LayerTimes:
    """A pass of one layer over one text on one core; times in seconds.

    Attributes:
        plain: Of a pass that is not watched.
        watching: The ratio of a watched pass to a plain one, with its interval as text.
        product: The operations per second of the core's matrix product of 2048 rows.
    """

    tokens: int
    parameters: int
    plain: float
    watching: float
    interval: str
    product: float

    @property
    def operations(self) -> float:
        """Operations per second of a plain pass, two for each parameter and token."""
        return 2 * self.parameters * self.tokens / self.plain

    def report(self) -> str:
        # The embedding is looked up, and only the last layer's product remains to be scaled.
        output = VOCABULARY * SHAPE["hidden_size"] / self.parameters
        per_token = self.plain / self.tokens * (LAYERS + output)
        years = TOKENS * per_token * self.watching / (365.25 * 24 * HOUR)
        return (
            f"One decoder layer of a 70B model's shape (8192 wide, 64 heads on 8, float32, "
            f"{self.parameters / 1e6:.0f} million parameters) on one core of {cpu_name()}, a text "
            f"of {self.tokens:,} tokens: {self.plain:.1f} s, {self.operations / 1e9:.0f} Gflop/s, "
            f"{self.operations / self.product:.0%} of the core's matrix product; watched "
            f"{self.interval} times as long. {LAYERS} such layers and the output layer take "
            f"{per_token:.2f} s a token: {1 / per_token:.2f} tokens a second and core, and "
            f"{years:,.0f} core-years for {TOKENS / 1e9:.0f} billion tokens, watched."
        )


def measure_layer(tokens: int, rounds: int) -> LayerTimes:
    """One layer with random weights, by the clock of the processor, plain and watched in turn."""
    config = LlamaConfig(**SHAPE, num_hidden_layers=1, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
    layer = layer.to_empty(device="cpu").eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    x = torch.randn(1, tokens, config.hidden_size)
    places = torch.arange(tokens)[None]
    rope = LlamaRotaryEmbedding(config)(x, places)

    def run() -> None:
        with torch.no_grad():
            layer(x, position_embeddings=rope, position_ids=places)

    def run_watched() -> None:
        with hw.observe(layer) as watch:
            run()
        assert len(watch.table().heads) == config.num_attention_heads

    left, right = torch.randn(2048, 8192), torch.randn(8192, 8192)
    cases = {"plain": run, "watched": run_watched, "product": lambda: left @ right}
    times = interleaved(cases, rounds, "cpu")
    ratio = times.ratio("watched", "plain")
    return LayerTimes(
        tokens,
        sum(weight.numel() for weight in layer.parameters()),
        times.median("plain") / 1000,
        ratio.median,
        str(ratio),
        2 * 2048 * 8192 * 8192 / (times.median("product") / 1000),
    )


def measure_reduction(rounds: int = 5) -> tuple[float, float, int]:
    """Seconds of one core to write a shard's table, and to read and add it; its bytes."""
    rng = np.random.default_rng(0)
    heads = tuple(Head("", layer, head) for layer in range(80) for head in range(64))

    def totals() -> Totals:
        rows = rng.random((8, HEADS))
        return Totals.of_texts(rows, np.ones_like(rows), rows.max(0))

    whole = HeadTable(heads, np.arange(HEADS) // 8, {name: totals() for name in DEFAULT})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "table.parquet"
        started = time.process_time()
        for _ in range(rounds):
            whole.save(path)
        written = time.process_time()
        for _ in range(rounds):
            whole += HeadTable.load(path)
        merged = time.process_time()
        size = path.stat().st_size
    return (written - started) / rounds, (merged - written) / rounds, size


if __name__ == "__main__":
    main()
