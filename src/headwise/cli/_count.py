"""`headwise count`: what the attention of a model costs, computed from its sizes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise._display import did_you_mean
from headwise.cli._options import DtypeName, Json, opt
from headwise.cli._print import print_json, print_result
from headwise.errors import ArgumentError, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.counts import ModelSizes

# The options that describe a layer, by their names in `layer_sizes`.
_LAYER_OPTIONS = {
    "d_model": "--d-model",
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "biases": "--biases",
    "no_out_proj": "--no-out-proj",
    "n_layers": "--layers",
}
_Size = int | None


def _size(name: str, default: str | bool, description: str) -> typer.models.OptionInfo:
    return opt(description, name, shown=default, min=1)


_KNOWN = "A known model such as bert-base, a config.json, or a folder with one."
_Known = Annotated[str | None, typer.Argument(metavar="MODEL", help=_KNOWN)]


def count(
    model: _Known = None,
    d_model: Annotated[
        _Size, _size("--d-model", False, "Instead of MODEL: the width of a layer.")
    ] = None,
    n_heads: Annotated[_Size, _size("--heads", False, "The layer's query heads.")] = None,
    n_kv_heads: Annotated[
        _Size, _size("--kv-heads", "heads", "The layer's key/value heads.")
    ] = None,
    head_dim: Annotated[
        _Size, _size("--head-dim", "d-model / heads", "The width of one head.")
    ] = None,
    biases: Annotated[
        str | None, opt("The projections with a bias, such as QKVO.", shown="none")
    ] = None,
    no_out_proj: Annotated[
        bool, opt("The layer has no output projection W_O.", "--no-out-proj")
    ] = False,
    n_layers: Annotated[_Size, _size("--layers", "1", "The number of such layers.")] = None,
    tokens: Annotated[int, opt("New tokens to compute.", min=1)] = 1024,
    cached: Annotated[int, opt("Earlier tokens, which are in the cache.", min=0)] = 0,
    keys: Annotated[
        _Size, _size("--keys", "tokens + cached", "The number of keys, for cross-attention.")
    ] = None,
    dtype: Annotated[DtypeName, opt("The dtype of cached keys and values.")] = ("bfloat16"),
    as_json: Json = False,
) -> None:
    """Count parameters, multiply-adds and cache bytes of attention.

    Without MODEL and without sizes, lists the known models.
    """
    values = dict(locals())  # all parameters; most describe a layer
    from headwise.counts import PRESETS
    from headwise.counts import count as count_all

    sizes = {name: values[name] for name in _LAYER_OPTIONS if values[name] not in (None, False)}
    is_single = bool(model or sizes)
    models = [_model_sizes(model, sizes)] if is_single else list(PRESETS.values())
    facts = [count_all(entry, tokens, keys, cached=cached, dtype=dtype) for entry in models]
    if as_json:
        print_json(facts[0] if is_single else facts)
    elif is_single:
        _print_model(facts[0])
    else:
        _print_list(facts)


def _model_sizes(model: str | None, options: Mapping[str, Any]) -> "ModelSizes":
    """The sizes of a known model or a file, or of the layers that the options describe."""
    from headwise.counts import PRESETS, ModelSizes, layer_sizes, read_config

    if model is not None and options:
        raise ArgumentError(
            f"count: {model} has its own sizes, which {_option_names(options)} would change. Leave "
            f"one of them out."
        )
    if model is None:
        sizes = dict(options)
        n_layers, out_proj = sizes.pop("n_layers", 1), not sizes.pop("no_out_proj", False)
        if missing := [name for name in ("d_model", "n_heads") if name not in sizes]:
            raise ArgumentError(
                f"count: {_option_names(options)} alone does not describe a layer. Add "
                f"{' and '.join(_LAYER_OPTIONS[name] for name in missing)}."
            )
        return ModelSizes("", layer_sizes(**sizes, out_proj=out_proj), n_layers)
    if model in PRESETS:
        return PRESETS[model]
    if not Path(model).exists():
        raise InputError(
            f"count: {model} is neither a file or folder nor a known model."
            f"{did_you_mean(model, PRESETS)} "
            f"The known models are {', '.join(PRESETS)}."
        )
    return read_config(model)


def _option_names(names: Iterable[str]) -> str:
    return " ".join(_LAYER_OPTIONS[name] for name in names)


def _print_model(facts: Mapping[str, Any]) -> None:
    """Print one model: its sizes, parameters, multiply-adds and cache."""
    sizes, model, text = facts["sizes"], facts["model"], facts["text"]
    grouped = sizes["n_kv_heads"] != sizes["n_heads"]
    kv_heads = f" on {sizes['n_kv_heads']} of keys and values" if grouped else ""
    name = f"{facts['name']}: " if facts["name"] else ""
    print_result(
        f"{name}layers {model['layers']}, d_model {sizes['d_model']}, "
        f"heads {sizes['n_heads']}{kv_heads}, each of width {sizes['head_dim']}"
    )
    if facts["source"]:
        print_result(f"Sizes: {facts['source']}")
    _print_whole(_parameter_table(facts))
    total = model["all_parameters"]
    share = "" if total is None else f", {model['share']:.1%} of the model's {total:,}"
    print_result(f"{model['parameters']:,} parameters together{share}.")
    _print_whole(_work_table(facts))
    cached = f", {text['cached']:,} of them cached" if text["cached"] else ""
    print_result(f"Queries {text['queries']:,}, keys {text['keys']:,}{cached}.")
    print_result(f"{model['flops']:.3g} FLOPs together: a multiply-add is two.")
    print_result("")
    if not model["cache_bytes"]:
        print_result("An encoder reads all tokens at once: there is no cache.")
        return
    print_result(
        f"Keys and values in {model['cache_dtype']}: {facts['layer']['cache_bytes']:,} bytes per "
        f"token and layer, {model['cache_bytes']:,} per token, {text['cache_bytes']:,} in all."
    )


def _parameter_table(facts: Mapping[str, Any]) -> "Table":
    """The parameters of each projection, in one layer and in all layers."""
    layer, multiples = facts["layer"], _multiples(facts)
    names = ("weights", "biases")
    rows = {role: [layer[name][role] for name in names] for role in layer["weights"]}
    rows["all"] = [sum(layer[name].values()) for name in names]
    table = _table("parameters", *(f"{name}{_by(n)}" for n in multiples for name in names))
    for role, numbers in rows.items():
        table.add_row(role, *(f"{n * number:,}" for n in multiples for number in numbers))
    return table


def _work_table(facts: Mapping[str, Any]) -> "Table":
    """The multiply-adds of each step, in one layer and in all layers."""
    work, multiples = facts["layer"]["multiply_adds"], _multiples(facts)
    total = sum(work.values())
    table = _table("work", *(f"multiply-adds{_by(n)}" for n in multiples), "share")
    for part, number in (work | {"all": total}).items():
        table.add_row(part, *(f"{n * number:,}" for n in multiples), f"{number / total:.1%}")
    return table


def _multiples(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """One layer, and all layers if there are more."""
    n_layers = facts["model"]["layers"]
    return (1, n_layers) if n_layers > 1 else (1,)


def _by(n_layers: int) -> str:
    return "" if n_layers == 1 else f" x {n_layers}"


def _print_list(models: Sequence[Mapping[str, Any]]) -> None:
    """Print the known models, a line each."""
    names = ("d_model", "n_heads", "n_kv_heads")
    table = _table("model", "layers", "d_model", "heads", "kv", "weights", "share", "cache")
    for facts in models:
        sizes, model = facts["sizes"], facts["model"]
        numbers = (model["layers"], *(sizes[name] for name in names))
        weights = f"{model['weights'] / 1e6:,.1f} M"
        cache = f"{model['cache_bytes'] / 1e3:,.0f} kB" if model["cache_bytes"] else "none"
        table.add_row(facts["name"], *map(str, numbers), weights, f"{model['share']:.0%}", cache)
    _print_whole(table)
    print_result(
        "Weights of attention and their share of the model; cache bytes per token, in --dtype."
    )


def _print_whole(table: "Table") -> None:
    """Print a table at full width: a narrow terminal wraps its lines, but truncates no number."""
    from rich.console import Console

    Console(highlight=False, width=1000).print(table)


def _table(first: str, *columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
