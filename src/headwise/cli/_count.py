"""`headwise count`: what the attention of a model costs, from its sizes alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli._options import DtypeName, Json
from headwise.cli._print import say, say_json
from headwise.errors import ArgumentError, InputError, ShapeError

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.counts import ModelSizes

# Options that describe a layer, by what `layer_sizes` calls them.
_LAYER = {
    "d_model": "--d-model",
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "biases": "--biases",
    "no_out_proj": "--no-out-proj",
    "n_layers": "--layers",
}
_Size = int | None


def _size(name: str, default: str | bool, says: str) -> typer.models.OptionInfo:
    return typer.Option(name, show_default=default, min=1, help=says)


def count(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A known model such as bert-base, a config.json, or a folder with one.",
        ),
    ] = None,
    d_model: Annotated[_Size, _size("--d-model", False, "Count a layer of this width.")] = None,
    n_heads: Annotated[_Size, _size("--heads", False, "Its query heads.")] = None,
    n_kv_heads: Annotated[_Size, _size("--kv-heads", "heads", "Its key/value heads.")] = None,
    head_dim: Annotated[_Size, _size("--head-dim", "d-model / heads", "Of one head.")] = None,
    biases: Annotated[
        str | None, typer.Option(help="Its roles with a bias, such as QKVO.", show_default="none")
    ] = None,
    no_out_proj: Annotated[bool, typer.Option("--no-out-proj", help="It has no W_O.")] = False,
    n_layers: Annotated[_Size, _size("--layers", "1", "How many of them.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed.")] = 1024,
    cached: Annotated[int, typer.Option(min=0, help="Tokens before them, in a cache.")] = 0,
    keys: Annotated[
        _Size, _size("--keys", "tokens + cached", "Keys in all, for cross-attention.")
    ] = None,
    dtype: Annotated[
        DtypeName, typer.Option(help="What keys and values are kept in.")
    ] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Count parameters, multiply-adds and cache bytes of attention.

    Without MODEL and sizes, the known models are listed.
    """
    flags = dict(locals())  # all parameters; most describe a layer
    from headwise.counts import PRESETS
    from headwise.counts import count as count_all

    given = {name: flags[name] for name in _LAYER if flags[name] not in (None, False)}
    models = [_find(model, given)] if model or given else list(PRESETS.values())
    facts = [count_all(each, tokens, keys, cached=cached, dtype=dtype) for each in models]
    if as_json:
        say_json(facts[0] if model or given else facts)
    elif model or given:
        _show(facts[0])
    else:
        _list(facts)


def _find(model: str | None, given: Mapping[str, Any]) -> "ModelSizes":
    """The model of a name or of a file, or the layers that the options describe."""
    from headwise.counts import PRESETS, ModelSizes, layer_sizes, read_config

    if model is not None and given:
        raise ArgumentError(
            f"count: {model} has sizes of its own, and {_options(given)} would change them. "
            f"Leave out either."
        )
    if model is None:
        sizes = dict(given)
        n_layers, out_proj = sizes.pop("n_layers", 1), not sizes.pop("no_out_proj", False)
        if not {"d_model", "n_heads"} <= sizes.keys():
            raise ArgumentError(
                f"count: {_options(given)} alone tells no layer. Give --d-model and --heads."
            )
        try:
            return ModelSizes("", layer_sizes(**sizes, out_proj=out_proj), n_layers)
        except (ArgumentError, ShapeError) as error:
            raise type(error)(_in_options(str(error))) from error
    if model in PRESETS:
        return PRESETS[model]
    if not Path(model).exists():
        raise InputError(
            f"count: {model} is neither a file or folder nor a known model. "
            f"Those are {', '.join(PRESETS)}."
        )
    return read_config(model)


def _in_options(message: str) -> str:
    """What `layer_sizes` says, in the words of the command."""
    for name, option in _LAYER.items():
        message = re.sub(rf"\b{name}\b", option, message.replace(f"{name}=", f"{name} "))
    return message.replace("layer_sizes:", "count:")


def _options(given: Iterable[str]) -> str:
    return " ".join(_LAYER[name] for name in given)


def _show(facts: Mapping[str, Any]) -> None:
    """One model: what it holds, what it does, what it keeps."""
    sizes, model, text = facts["sizes"], facts["model"], facts["text"]
    shared = sizes["n_kv_heads"] != sizes["n_heads"]
    on = f" on {sizes['n_kv_heads']} of keys and values" if shared else ""
    name = f"{facts['name']}: " if facts["name"] else ""
    say(
        f"{name}layers {model['layers']}, d_model {sizes['d_model']}, "
        f"heads {sizes['n_heads']}{on}, each of width {sizes['head_dim']}"
    )
    if facts["source"]:
        say(f"Sizes: {facts['source']}")
    _print(_parameters(facts))
    whole = model["all_parameters"]
    part = "" if whole is None else f", {model['share']:.1%} of the model's {whole:,}"
    say(f"{model['parameters']:,} parameters together{part}.")
    _print(_progress(facts))
    cached = f", {text['cached']:,} of them cached" if text["cached"] else ""
    say(f"Queries {text['queries']:,}, keys {text['keys']:,}{cached}.")
    say(f"{model['flops']:.3g} FLOPs together: a multiply-add is two.")
    say("")
    say(
        f"Keys and values in {model['cache_dtype']}: {facts['layer']['cache_bytes']:,} bytes a "
        f"token and layer, {model['cache_bytes']:,} a token, {text['cache_bytes']:,} in all."
    )


def _parameters(facts: Mapping[str, Any]) -> "Table":
    """What each role holds, in a layer and in all of them."""
    held, times = facts["layer"], _times(facts)
    names = ("weights", "biases")
    rows = {role: [held[name][role] for name in names] for role in held["weights"]}
    rows["all"] = [sum(held[name].values()) for name in names]
    table = _table("parameters", *(f"{name}{_by(n)}" for n in times for name in names))
    for role, own in rows.items():
        table.add_row(role, *(f"{n * number:,}" for n in times for number in own))
    return table


def _progress(facts: Mapping[str, Any]) -> "Table":
    """What each part does, in a layer and in all of them."""
    work, times = facts["layer"]["multiply_adds"], _times(facts)
    total = sum(work.values())
    table = _table("work", *(f"multiply-adds{_by(n)}" for n in times), "share")
    for part, number in (work | {"all": total}).items():
        table.add_row(part, *(f"{n * number:,}" for n in times), f"{number / total:.1%}")
    return table


def _times(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """One layer, and then all of them if there are more."""
    n_layers = facts["model"]["layers"]
    return (1, n_layers) if n_layers > 1 else (1,)


def _by(n_layers: int) -> str:
    return "" if n_layers == 1 else f" x {n_layers}"


def _list(models: Sequence[Mapping[str, Any]]) -> None:
    """The known models, a line each."""
    names = ("d_model", "n_heads", "n_kv_heads")
    table = _table("model", "layers", "d_model", "heads", "kv", "weights", "share", "cache")
    for facts in models:
        sizes, model = facts["sizes"], facts["model"]
        numbers = (model["layers"], *(sizes[name] for name in names))
        weights, cache = f"{model['weights'] / 1e6:,.1f} M", f"{model['cache_bytes'] / 1e3:,.0f} kB"
        table.add_row(facts["name"], *map(str, numbers), weights, f"{model['share']:.0%}", cache)
    _print(table)
    say("Weights of attention, their share of the model; cache a token, in the type of --dtype.")


def _print(table: "Table") -> None:
    """Print a table whole: a terminal that is narrower breaks its lines, and no number is cut."""
    from rich.console import Console

    Console(highlight=False, width=1000).print(table)


def _table(first: str, *others: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
