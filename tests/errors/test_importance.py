"""What cannot be scored is refused by name, and the model is unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwise.corpora import SentencePair
from headwise.errors import (
    ArgumentError,
    HeadError,
    HeadwiseError,
    InputError,
    OutputError,
    ShapeError,
)
from headwise.scoring import EMBEDDING, Gates, Loss, find_loss, importance, paired, prune_curves
from headwise.tables import Curves
from oracles import modules_of, padded

BATCH = {k: v for k, v in padded([[5, 9, 7], [4, 6]], "right").items() if k != "position_ids"}


ONE_TOKEN = {
    "input_ids": torch.tensor([[5, 3], [7, 1]]),
    "attention_mask": torch.tensor([[1, 1], [1, 0]]),
}


def _refused(
    kind: type[HeadwiseError], message: str, *args: Any, name: str = "Bert", **options: Any
) -> None:
    model = zoo.make(name)
    before = modules_of(model)
    with pytest.raises(kind, match=message):
        importance(model, *(args or ([BATCH],)), **options)
    assert modules_of(model) == before


def constant(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * 0


def infinite(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * torch.tensor([1.0, torch.inf]) * 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": constant, "method": Gates()}, "'constant' grows by 0 without any head"),
        ({"loss": infinite}, "scores are not finite in 1 of 2 texts"),
        ({"method": "magic"}, "method='magic' is not one of half-gate, gradient"),
        ({"rounds": 0}, "rounds=0 for 8 heads"),
        ({"rounds": 9}, "rounds=9 for 8 heads"),
        ({"method": "gradient"}, "loss 'embedding' is least at the full model"),
        ({"method": "curvature", "loss": "lm", "name": "Llama"}, "the loss is 'lm'"),
        ({"loss": "perplexity"}, "'perplexity' is not one of lm, masked-lm, label, embedding"),
        ({"loss": "label"}, "has no logits"),
        ({"loss": "masked-lm", "name": "Llama"}, "input_ids, attention_mask, no labels"),
        ({"loss": "embedding", "name": "Llama"}, "CausalLMOutputWithPast has no vector"),
    ],
)
def test_impossible_settings_and_losses_are_refused(options: dict[str, Any], message: str) -> None:
    _refused(ArgumentError, message, **options)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "0 given"),
        (["some text"], "1 texts without a tokenizer"),
        ([torch.zeros(1, 2)], "batches: a batch is of type Tensor"),
        (
            [{"inputs_embeds": torch.randn(1, 3, 24)}],
            "lm: the batch has inputs_embeds, no input_ids",
        ),
        ([ONE_TOKEN], "loss lm: 1 of 2 texts have no token"),
    ],
)
def test_unusable_batches_are_refused(batches: Any, message: str) -> None:
    _refused(ArgumentError, message, batches, name="Llama")


def test_a_batch_without_a_tensor_has_no_loss() -> None:
    loss = find_loss(constant, nn.Identity(), {"return_dict": True})
    with pytest.raises(ArgumentError, match=r"no tensor in \['return_dict'\]"):
        loss.per_text((torch.zeros(1, 1, 1),), {"return_dict": True})


def test_methods_of_one_pass_cannot_be_resumed(tmp_path: Path) -> None:
    _refused(
        ArgumentError, "part' with method='half-gate'", [BATCH], resume=tmp_path / "part"
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def _stop(done: int, total: int) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Electra"}, "of model='[0-9a-f]{16}', not '"),
        ({"batch": {"input_ids": torch.tensor([[5, 9]])}}, "of texts='[0-9a-f]{16}', not '"),
        ({"method": "zero-ablation"}, "of method='ablation', not 'zero-ablation'"),
        ({"loss": Loss("own", EMBEDDING.of)}, "of loss='embedding', not 'own"),
        ({"rounds": 2}, "of rounds='1', not '2'"),
    ],
)
def test_unfinished_scores_of_another_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "scores.part"
    with pytest.raises(RuntimeError, match="stop"):
        importance(zoo.make("Bert"), [BATCH], "ablation", resume=path, on_progress=_stop)
    before = path.read_bytes()
    batch = changes.pop("batch", BATCH)
    options = {"method": "ablation", "resume": path, **changes}
    _refused(InputError, message, [batch], **options)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no scores", b"\x08" + bytes(7) + b'{"a":{}}'])
def test_a_file_that_holds_no_unfinished_scores(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    _refused(InputError, "mine holds no unfinished scores", [BATCH], "ablation", resume=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :-1], r"heads gone' is \(2, 7\) float64, not \(2, 8\) float64"),
        (lambda x: x.flatten(), r"is \(16,\) float64, not \(2, 8\)"),
        (lambda x: x.float(), r"is \(2, 8\) float32, not"),
        (lambda x: x + torch.inf, r"heads gone' holds inf"),
    ],
)
def test_broken_unfinished_scores(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    path = tmp_path / "scores.part"
    with pytest.raises(RuntimeError, match="stop"):
        importance(zoo.make("Bert"), [BATCH], "ablation", resume=path, on_progress=_stop)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tables = {name: change(x).contiguous() for name, x in load_file(path).items()}
    save_file(tables, path, about)
    before = path.read_bytes()
    _refused(InputError, message, [BATCH], "ablation", resume=path)
    assert path.read_bytes() == before


def test_a_model_saved_in_its_place(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    message = "of headwise_unfinished=None, not '1'"
    _refused(InputError, message, [BATCH], "ablation", resume=tmp_path / "model.safetensors")


def test_an_unwritable_file(tmp_path: Path) -> None:
    _refused(
        OutputError, "part cannot be written", [BATCH], "ablation", resume=tmp_path / "no/part"
    )


def test_unfinished_scores_of_another_loss_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "scores.part"
    with pytest.raises(RuntimeError, match="stop"):
        importance(
            zoo.make("Bert"), [BATCH], "ablation", resume=path, on_progress=_stop,
            loss=lambda output, batch: output[0].sum((1, 2)),
        )  # fmt: skip
    options = {"method": "ablation", "resume": path}
    loss = lambda output, batch: output[0].square().sum((1, 2))  # noqa: E731
    _refused(InputError, "of loss='<lambda> [0-9a-f]{8}', not", loss=loss, **options)


def test_a_tokenizer_without_a_mask() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = transformers.BertConfig(
        vocab_size=3, hidden_size=12, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=8,
    )  # fmt: skip
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(InputError, match="Tokenizer has no mask token"):
        importance(transformers.BertForMaskedLM(config), ["a"], tokenizer=tokenizer)


def whole(output: Any, batch: Any) -> Tensor:
    return output[0].sum()


def a_list(output: Any, batch: Any) -> Any:
    return [1.0, 2.0]


BERT = zoo.make("Bert")
ONE = Curves(np.array([0, 1]), 8, {"one": np.zeros((1, 2, 3))})
MINE: dict[str, Any] = {"mine": [["L0.H0"]]}


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda: Gates(penalty=0.0), ArgumentError, r"Gates: penalty=0\.0"),
        (lambda: Gates(penalty=float("nan")), ArgumentError, "Gates: penalty=nan"),
        (lambda: Gates(steps=0), ArgumentError, "Gates: steps=0"),
        (lambda: Gates(seeds=-1), ArgumentError, "Gates: seeds=-1"),
        (lambda: Gates(rate=0.0), ArgumentError, r"Gates: rate=0\.0"),
        (lambda: importance(BERT, [BATCH], loss=whole), ShapeError, r"shape \(\) for 2 texts"),
        (lambda: importance(BERT, [BATCH], loss=a_list), ShapeError, "a_list: it returns a list"),
        (
            lambda: find_loss(None, nn.Linear(2, 2), {"x": torch.zeros(1, 2)}),
            ArgumentError,
            "no default loss fits Linear with inputs x",
        ),
        (lambda: ONE.mean("two"), ArgumentError, "no order 'two'.*There are one"),
        *(
            (lambda x=x: ONE.elbow("one", x), ArgumentError, f"allowed={x}")
            for x in (0.0, -1.0, float("nan"))
        ),
        (
            lambda: prune_curves(BERT, [BATCH], {"mine": [["L7.H0"]]}),
            HeadError,
            r"no head L7\.H0",
        ),
        (lambda: prune_curves(BERT, [BATCH], {}), ArgumentError, "prune_curves: 0 orders"),
        (
            lambda: prune_curves(BERT, [BATCH], MINE, reference=[BATCH], cut=lambda _: None),
            ArgumentError,
            "prune_curves: 1 orders, cut=.*a reference: True",
        ),
        (
            lambda: paired([SentencePair("a", "b", 1.0)], nn.Linear(1, 1), None),
            ArgumentError,
            "paired: 1 pairs",
        ),
    ],
)
def test_what_cannot_be_asked(
    ask: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask()


@pytest.mark.parametrize("removed", [[], [1, 2], [0, 2, 2], [0, 1, 2]])
def test_points_that_do_not_rise_from_zero(removed: list[int]) -> None:
    values = np.zeros((1, 2 if removed == [0, 1, 2] else len(removed), 4))
    with pytest.raises(ShapeError, match=r"points at \["):
        Curves(np.array(removed, dtype=np.int64), 8, {"one": values})
