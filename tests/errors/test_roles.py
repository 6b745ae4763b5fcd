"""Each refusal when roles are evaluated says what is wrong: calls and messages."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import headwise as hw
from headwise.corpora import AnnotatedText, Choice, Example, name_texts
from headwise.errors import (
    ArgumentError,
    HeadError,
    HeadwiseError,
    InputError,
    ShapeError,
    UnsupportedError,
)
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.ownership import check_edits_reach, edit_heads, find_attentions
from headwise.roles import (
    AlignedBatch,
    ChoiceRelation,
    Evidence,
    FoundHeads,
    Roles,
    TokenText,
    agreement,
    behavior,
    find_roles,
    induction,
    name_moving,
    translation,
)
from headwise.roles.relations import tokenize
from planted import TOKENIZER, Planted, PlantedGPT, lines
from planted_pairs import PlantedPairs, sharp_t5, spelled

MODEL = Planted([("offset -1",)], causal=True)
FAST = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)  # which cannot read an empty text
Rows = list[tuple[Callable[[], Any], type[HeadwiseError], str]]


class Weightless(torch.nn.Module):
    config = MODEL.config

    def forward(self, input_ids, attention_mask):
        x = torch.nn.functional.one_hot(input_ids, 50).float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Deaf(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids


class Hasty(Planted):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids[:, :-2], attention_mask[:, :-2])


class Both(Planted):
    def __init__(self):
        super().__init__([("offset -1",)], causal=True)
        self.config = SimpleNamespace(context=48, is_encoder_decoder=True)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None):
        return super().forward(input_ids, attention_mask)


def _roles(model: Any = MODEL, texts: Any = None, **options: Any) -> Roles:
    options = {"tokenizer": TOKENIZER, "evidence": Evidence(nulls=())} | options
    return find_roles(model, lines(3) if texts is None else texts, **options)


_found_roles = cache(lambda: _roles(texts=lines(6)))


def _of(nulls: Any) -> dict[str, Any]:
    return {"evidence": Evidence(nulls)}


def right(text: TokenText) -> tuple[()]:
    return ()


ROLES: Rows = [
    (lambda: Evidence(models=0), ArgumentError, r"Evidence: models=0\. Give 1 or more"),
    (lambda: Evidence(splits=0), ArgumentError, r"Evidence: splits=0\. Give 1 or more"),
    (lambda: Evidence(seed=-1), ArgumentError, r"Evidence: seed=-1\. Give 0 or more"),
    (lambda: Evidence(("permuted", "reversed")), ArgumentError,
     r"Evidence: no null 'reversed'\. Choose from permuted"),
    (lambda: _roles(texts=[]), InputError, "find_roles: 0 texts hold no token"),
    (lambda: _roles(texts=["", "  "]), InputError, "find_roles: 2 texts hold no token"),
    (lambda: _roles(texts=[], tokenizer=FAST), InputError, "find_roles: 0 texts hold no token"),
    (lambda: _roles(texts=["", "  "], tokenizer=FAST), InputError,
     "find_roles: 2 texts hold no token"),
    (lambda: _roles(texts=7), ArgumentError, r"find_roles: texts is 7, an int\. Give a str or A"),
    (lambda: _roles(**_of(("exchanged",))), ArgumentError,
     r"find_roles: the null 'exchanged' is of examples"),
    *((partial(_roles, relations={name: lambda text: []}), ArgumentError,
       rf"find_roles: '{name}' is a role already")
      for name in ("self", "induction", "prefix matching")),
    (lambda: _roles(groups=["a", "b"]), ArgumentError, "find_roles: 2 groups for 3 texts. Give a"),
    (lambda: _roles(texts=[*lines(2), *lines(2)], groups="abcb"), ArgumentError,
     "find_roles: the groups 'a' and 'c' have the same text '.*Give copies"),
    (lambda: _roles(heads=[]), ArgumentError, r"find_roles: heads=\[\] names none of 1\. Name"),
    (lambda: _roles(heads="L7.H0"), HeadError, r"no head L7\.H0"),
    (lambda: _roles(roles=[]), ArgumentError, r"find_roles: roles=\[\] names none\. There are "),
    (lambda: _roles(roles="diffuse"), ArgumentError, "there is no role 'diffuse'. "),
    (lambda: _roles(roles="ofset -2"), ArgumentError,
     r"find_roles: there is no role 'ofset -2'\. Did you mean offset -2\? There are self,"),
    (lambda: _roles(relations={"far": lambda text: [(0, 99)]}), ArgumentError,
     r"'far' gives \(0, 99\) for a text of 2[0-9] tokens"),
    (lambda: _roles(Weightless(), **_of(("permuted",))), UnsupportedError,
     "Weightless has no weight matrix to permute"),
    (lambda: _roles(**_of(("random",))), UnsupportedError,
     "Evidence: Planted has no known initialization .*Leave 'random' out"),
    (lambda: _roles(Deaf(), **_of(None)), UnsupportedError,
     "no self-attention of Deaf was captured"),
    (lambda: _roles(Hasty([("first",)], causal=True), **_of(None)), UnsupportedError,
     r"Hasty was given 3 texts of 2\d .* to 3 of"),
    (lambda: _roles(Both(), **_of(None)), UnsupportedError,
     "find_roles: Both reads two texts, and .* encoder"),
    (lambda: tokenize(type("Slow", (), {"is_fast": False})(), [AnnotatedText("a")], 8),
     UnsupportedError, r"tokenize: Slow cannot say .*use_fast=True"),
    (lambda: tokenize(Tokenizer(models.BPE({"a": 0, "b": 1}, [])), [AnnotatedText("b " + "a" * 10)],
                      8), InputError, r"tokenize: 'aaaaaaaaaa' has more tokens .* \(8\)"),
    *((partial(lambda ask: ask(_found_roles(), "L7.H0"), ask), HeadError, r"L7\.H0")
      for ask in (Roles.why, Roles.examples, Roles.of)),
    (lambda: _roles(texts=["una frase que nadie ,"], **_of(None)), InputError,
     r"find_roles: 80% of the tokens .* are unknown to the"),
    (lambda: _roles(relations={"she": ChoiceRelation(right, lambda text: (1 / 0 for _ in "a"))}),
     ArgumentError, r"candidates of 'she' fail \(ZeroDivisionError: division by zero\) for the te"),
    (lambda: ChoiceRelation(None, right), ArgumentError, "ChoiceRelation: pairs is .*Give a"),
    (lambda: ChoiceRelation(right, [(1, 2)]), ArgumentError,
     "ChoiceRelation: candidates is .*Give a"),
]  # fmt: skip

# What effects cannot be measured by.


PREDICTS = PlantedGPT([("before",), ("induction",)])
CHOICE = Choice("w1 w2 w1", "w2", "w3")
IDS = torch.tensor([[8, 9, 8], [9, 8, 9]])
_predicting = cache(lambda: _roles(PREDICTS, lines(6)))


class Ahead(PlantedGPT):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids.flip(1)).flip(1)


class Headless(Planted):
    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(last_hidden_state=super().forward(input_ids))


def _agreement(choice: Choice = CHOICE, model: Any = PREDICTS) -> Any:
    return agreement(model, [choice], tokenizer=TOKENIZER)


def _effects(*tasks: Any, model: Any = PREDICTS, **options: Any) -> Roles:
    return _predicting().effects(model, [*tasks], **options)


def _induction(sequences: int = 4) -> Any:
    return induction(PREDICTS, lines(6), tokenizer=TOKENIZER, sequences=sequences)


def _of_another_model() -> None:
    other = PlantedGPT([("before", "even"), ("induction", "even")])
    _effects(_agreement(model=other), model=other)


def _loss(name: str, loss: Callable[[Any, Any], Any], ids: torch.Tensor = IDS, **more: Any) -> Any:
    return behavior(name, [{"input_ids": ids}], loss, **more)


NO_TARGET = "none of these texts has a target for PlantedGPT"
EFFECTS: Rows = [
    (lambda: behavior("mine", [], lambda output, batch: output), ArgumentError,
     "behavior: batches holds no batch"),
    (lambda: translation(PREDICTS, [AnnotatedText("w1 w2")], tokenizer=TOKENIZER), ArgumentError,
     f"behavior: {NO_TARGET}"),
    (lambda: induction(PREDICTS, ["w1 w2"], tokenizer=TOKENIZER), ArgumentError, NO_TARGET),
    # One text has no other name for its control.
    (lambda: name_moving(PREDICTS, [AnnotatedText("w1 w2")], tokenizer=TOKENIZER), ArgumentError,
     NO_TARGET),
    (lambda: name_moving(PREDICTS, name_texts(1, names=["w1", "w2"]), tokenizer=TOKENIZER),
     ArgumentError, NO_TARGET),
    (lambda: _agreement(Choice("w1", "w2", "w2")), InputError,
     r"'w2' and 'w2' after 'w1' do not differ within .* first 48"),
    (lambda: _agreement(Choice(" ".join(["w1"] * 60), "w2", "w3")), InputError,
     r"'w2' and 'w3' after ' w1.* first 48 tokens\. Give .* fewer"),
    (lambda: _agreement(model=Ahead([("before",), ("induction",)])), UnsupportedError,
     "behavior: Ahead looks ahead"),
    (lambda: _agreement(model=Headless([("offset -1",)], causal=True)), UnsupportedError,
     "behavior: Headless gives no logits for each"),
    (lambda: _effects(_agreement(), _agreement()), ArgumentError,
     r"effects: behaviors are named agreement, agreement\."),
    (_effects, ArgumentError, "effects: behaviors are named nothing"),
    (lambda: _effects(_loss("broken", lambda output, batch: output[:, 0, 0].log())), ArgumentError,
     "effects: 'broken' is not finite on 2 of 2 texts"),
    (lambda: _effects(_loss("mean", lambda output, _: output.mean(), IDS[:1, :2])), ShapeError,
     r"loss mean: shape \(\) for 1 texts\. Return one"),
    (_of_another_model, ArgumentError, r"effects: these are roles of the model [0-9a-f]{16}"),
    (lambda: _effects(_agreement(), heads=["L7.H0"]), HeadError, r"L7\.H0"),
    (lambda: replace(_induction(), control=()), ArgumentError,
     r"'induction' has labels \{'prefix.* no control"),
    (lambda: _loss("mine", lambda output, _: output[:, 0, 0], labels={"r": "moving"}),
     ArgumentError, r"Behavior: 'mine' has labels \{'r': 'moving'\}"),
    (lambda: _effects(replace(_induction(), control=_induction(3).control)), ArgumentError,
     "'induction' has 4 texts and 3 of its control"),
]  # fmt: skip

# Examples of task heads, and alignments.


CONFIG = MiniGPTConfig(vocab_size=60, context=24, d_model=12, n_heads=4, n_kv_heads=2, n_layers=1)
GOOD: dict[str, Any] = {
    "text": [3, 4, 5, 6, 7, 8],
    "query": (5, 6),
    "right": (0, 2),
    "wrong": (2, 4),
}
ONE = Example(**GOOD)


def _model() -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(CONFIG).eval()


def _heads(*examples: Any, model: Any = None, **options: Any) -> FoundHeads:
    return hw.find_heads(model or _model(), [*examples], **options)


@cache
def _found() -> FoundHeads:
    examples = [Example(**GOOD | {"text": [n % 7, 4, 5, 6, 7, 8]}) for n in range(8)]
    return _heads(*examples, evidence=hw.Evidence(nulls=()))


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"text": []}, r"has the text \[\]"),
    ({"text": [1.5, 2, 3, 4, 5, 6]}, "has the text"),
    ({"text": "a b"}, "1 example of strings without a tokenizer"),
    ({"answer": "a"}, "the answer 'a', and no tokenizer"),
    ({"query": (5, 7)}, r"query has \(5, 7\) in a text of 6 tokens"),
    ({"right": []}, r"right=\[\]"),
    ({"right": (2, 1)}, r"right has \(2, 1\)"),
    ({"wrong": 3}, "wrong has 3"),
    ({"wrong": (1, 3)}, r"\(0, 2\) and \(1, 3\) of right and wrong share a token"),
    ({"text": [1] * 30}, "30 tokens and an answer of 0, and the model reads 24"),
    ({"inputs": {"pixels": torch.ones(1, 3)}}, r"inputs \{'pixels': \(3,\)\}, and the first"),
]
PIXELS = {"pixels": torch.ones(1, 3, 4)}
NO_BATCH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PIXELS, {"pixels": [1.0]}),
    (PIXELS, {"pixels": torch.ones(1, 3, 5)}),
    ({"input_ids": torch.ones(1, 6)},) * 2,
]
APART = Example("w1 w2 w3", query=(6, 8), right=(2, 3), wrong=(0, 2))
EXAMPLES: Rows = [
    *((partial(lambda change: _heads(ONE, Example(**GOOD | change)), change), ArgumentError, said)
      for change, said in MALFORMED),
    *((partial(lambda two: _heads(*(Example(**GOOD, inputs=x) for x in two)), two), ArgumentError,
       r"has the inputs \{'(pixels|input_ids)': .*Give each") for two in NO_BATCH),
    (lambda: hw.find_heads(_model(), ONE), ArgumentError, "1 distinct example of 1"),
    (lambda: _heads(ONE, ONE, ONE), ArgumentError, "1 distinct example of 3. Give 60"),
    (lambda: hw.find_heads(_model(), "a"), ArgumentError, "examples is 'a'"),  # type: ignore[arg-type]
    (lambda: _heads(ONE, ONE, evidence=hw.Evidence(splits=3)), ArgumentError,
     r"Evidence\(splits=3\)"),
    (lambda: _heads(ONE, ONE, evidence=hw.Evidence(("shuffled",))), ArgumentError,
     "find_heads: the null 'shuffled' is of texts"),
    (lambda: _heads(ONE, ONE, most=0), ArgumentError, "most=0"),
    (lambda: _heads(ONE, ONE, most=2, heads="L0.H0"), ArgumentError, "most=2 with heads='L0.H0'"),
    (lambda: _heads(ONE, Example(**GOOD | {"text": [9, *range(4, 9)]}), heads=[],
                    evidence=hw.Evidence(())), ArgumentError, r"heads=\[\] names none of 4"),
    (lambda: _heads(ONE, Example(**GOOD | {"text": [9, *range(4, 9)]}), heads="L7.H0",
                    evidence=hw.Evidence(())), HeadError, r"no head L7\.H0"),
    (lambda: _heads(ONE, ONE, max_tokens=5), ArgumentError, "the model reads 5"),
    (lambda: _heads(ONE, ONE, model=sharp_t5()), UnsupportedError,
     "T5ForConditionalGeneration reads two texts"),
    (lambda: _heads(*(Example(**GOOD | {"text": [n, *range(4, 9)]}, answer=[3]) for n in range(4)),
                    model=zoo.make("Bert"), evidence=hw.Evidence(nulls=())), UnsupportedError,
     "BertModel gives no logits"),
    (lambda: _found().save("nowhere/heads.txt"), ArgumentError, r"ends in '\.txt'"),
    (lambda: _heads(APART, APART, tokenizer=TOKENIZER), ArgumentError, r"right has \(2, 3\), ' '"),
]  # fmt: skip

SOURCES, TARGETS = [[5, 9, 7, 3, 11, 4]], [[6, 2, 7]]
STATES = torch.zeros(1, 6, 32)


def _align(outputs: Any = TARGETS, inputs: Any = None, **options: Any) -> Any:
    inputs = {"input_ids": torch.tensor(SOURCES)} if inputs is None else inputs
    return hw.align(sharp_t5(), inputs, outputs, **options)


def _alignment_heads(span: tuple[int, int] | None = None) -> Any:
    batch = spelled(2, 0)
    spans = [[span] * len(outputs) for outputs in batch.outputs] if span else [[], []]
    batch = AlignedBatch(batch.inputs, batch.outputs, spans)
    return hw.find_alignment_heads(PlantedPairs(), batch)


ALIGNMENTS: Rows = [
    (_align, ArgumentError, "heads=None, and T5ForConditionalGeneration"),
    (lambda: _align(heads=(5, 0)), HeadError, r"no head \(5, 0\)"),
    (lambda: _align(heads=[]), ArgumentError, r"heads=\[\]"),
    (lambda: _align(TARGETS[0], heads=(0, 0)), ArgumentError, r"outputs=\[6, 2, 7\]"),
    (lambda: _align([*TARGETS, []], heads=(0, 0)), ArgumentError, "output 1 has no token"),
    (lambda: _align(inputs={"encoder_outputs": STATES}, heads=(0, 0)), ArgumentError,
     "encoder_outputs is a Tensor"),
    (lambda: _align(inputs={"encoder_outputs": {"last_hidden_state": STATES}}, heads=(0, 0)),
     ArgumentError, "encoder_outputs is a dict"),
    (_alignment_heads, ArgumentError, "spans of"),
    (lambda: _alignment_heads((2, 2)), ArgumentError, r"a span is \(2, 2\)"),
    (lambda: _alignment_heads((0, 99)), ArgumentError, "in a source of"),
    (lambda: hw.find_alignment_heads(PlantedPairs(), spelled(2, 0), most=0), ArgumentError,
     "most=0"),
    (lambda: hw.align(zoo.make("Bert"), {"input_ids": torch.tensor([[3]])}, [[4]], heads=(0, 0)),
     UnsupportedError, "has no function that shifts labels"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), [*ROLES, *EFFECTS, *EXAMPLES, *ALIGNMENTS])
def test_what_cannot_be_evaluated_is_named(
    call: Callable[[], Any], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


EXPORTS: list[tuple[str, dict[str, Any], type[HeadwiseError], str]] = [
    ("a.json", {"format": "onnx"}, ArgumentError, "no format 'onnx'"),
    ("a.json", {"model_name": None}, ArgumentError, "model_name=None"),
    ("a.json", {"heads": None}, ArgumentError, "the set was not tested"),
    ("a.json", {"format": "qrhead"}, ArgumentError, r"ends in '\.json'"),
    ("a.json", {"heads": []}, ArgumentError, r"heads=\[\] names none of"),
    ("a.json", {"heads": "L7.H0"}, HeadError, r"no head L7\.H0 among those that were measured\."),
    ("", {"format": "ctranslate2", "model_name": None}, HeadError,
     r"L0\.H0 is no head of cross-attention, and ctranslate2"),
    ("a.json", {"heads": "decoder.L0.H0"}, HeadError, r"decoder\.L0\.H0 belongs to a stack"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "kind", "message"), EXPORTS)
def test_exports_that_no_tool_reads_are_refused(
    name: str, given: dict[str, Any], kind: type[HeadwiseError], message: str, tmp_path: Path
) -> None:
    found = _found()
    if "decoder" in str(given):
        rows = found.frame().assign(name=[f"decoder.{name}" for name in found.frame()["name"]])
        found = FoundHeads(rows, found.heads, found.set_row)
    options = {"format": "vllm-hook", "model_name": "a/b", "heads": ["L0.H0"]} | given
    with pytest.raises(kind, match=message):
        found.export(tmp_path / name, options.pop("format"), **options)
    assert not list(tmp_path.iterdir())


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda c: c.pop("set"),
    lambda c: c.update(format="headwise-heads/2"),
    lambda c: c["heads"][0].update(name="L9"),
    lambda c: c["heads"][0].update(layer=3),
    lambda c: c["heads"].append(c["heads"][0]),
    lambda c: c["heads"][0].update(found="yes"),
    lambda c: c["heads"][0].update(effect="much"),
    lambda c: c["heads"][0].update(effect=True),
    lambda c: c["heads"][0].update(error=1.0),
    lambda c: c["heads"][0].pop("n"),
    lambda c: c["set"].update(heads=["L5.H0"]),
    lambda c: c["set"].update(heads="L0.H0"),
    lambda c: c["texts"].update(examples=1.5),
    lambda c: c["model"].update(name=None),
    lambda c: c.update(heads=[3]),
]


@pytest.mark.parametrize(("make", "change", "load", "message"), [
    (_found_roles, lambda c: c.update(headwise_roles=99), Roles.load,
     r"Roles\.load: .* schema 99, not 2"),
    (_found_roles, lambda c: c.update(heads=[{"name": "L0.H0"}]), Roles.load,
     r"Roles\.load: .* is incomplete or damaged"),
    *((_found, change, hw.load_heads, "load_heads: .* holds no heads") for change in CHANGES),
])  # fmt: skip
def test_changed_files_are_refused(
    make: Callable[[], Any], change: Callable[[dict[str, Any]], object],
    load: Callable[[Path], object], message: str, tmp_path: Path,
) -> None:  # fmt: skip
    path = make().save(tmp_path / "file.json")
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(InputError, match=message):
        load(path)


class Unprojected(torch.nn.Module):
    """Attention without an output projection; its output may be ignored."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.embed, self.read = torch.nn.Embedding(9, 4), read

    def forward(self, input_ids):
        x = self.embed(input_ids)[:, None]
        heads = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return (x + heads if self.read else x)[:, 0]


def test_heads_whose_output_is_never_read_cannot_be_edited():
    model, batch = Unprojected(read=False), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    with pytest.raises(UnsupportedError, match=r"edits of the heads of .* do not reach the output"):
        check_edits_reach(model, attentions, batch)
    with pytest.raises(UnsupportedError, match=r"has no output projection"):
        _ = attentions[0].output


def test_heads_without_a_projection_are_not_edited_under_gradients():
    model, batch = Unprojected(read=True), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    check_edits_reach(model, attentions, batch)
    with (
        edit_heads(model, attentions, lambda _, heads: heads * 0),
        pytest.raises(UnsupportedError, match=r"Unprojected has no output .*no_grad"),
    ):
        model(**batch)
    assert not model._forward_hooks
