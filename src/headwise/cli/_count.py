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
    sizes, layer, model, text = facts["sizes"], facts["layer"], facts["model"], facts["text"]
    grouped = sizes["n_kv_heads"] != sizes["n_heads"]
    kv_heads = f" on {sizes['n_kv_heads']} of keys and values" if grouped else ""
    name = f"{facts['name']}: " if facts["name"] else ""
    print_result(
        f"{name}layers {model['layers']}, d_model {sizes['d_model']}, "
        f"heads {sizes['n_heads']}{kv_heads}, each of width {sizes['head_dim']}"
    )
    if facts["source"]:
        print_result(f"Sizes: {facts['source']}")
    # One layer, and all layers if there are more.
    n_layers = model["layers"]
    multiples = {"": 1, f" x {n_layers}": n_layers} if n_layers > 1 else {"": 1}
    kinds = ("weights", "biases")
    rows = {role: [layer[kind][role] for kind in kinds] for role in layer["weights"]}
    rows["all"] = [sum(layer[kind].values()) for kind in kinds]
    _print_columns(
        ["parameters", *(f"{kind}{by}" for by in multiples for kind in kinds)],
        [
            [role, *(f"{n * number:,}" for n in multiples.values() for number in numbers)]
            for role, numbers in rows.items()
        ],
    )
    total = model["all_parameters"]
    share = "" if total is None else f", {model['share']:.1%} of the model's {total:,}"
    print_result(f"{model['parameters']:,} parameters together{share}.")
    work = layer["multiply_adds"]
    whole = sum(work.values())
    _print_columns(
        ["work", *(f"multiply-adds{by}" for by in multiples), "share"],
        [
            [part, *(f"{n * number:,}" for n in multiples.values()), f"{number / whole:.1%}"]
            for part, number in (work | {"all": whole}).items()
        ],
    )
    cached = f", {text['cached']:,} of them cached" if text["cached"] else ""
    print_result(f"Queries {text['queries']:,}, keys {text['keys']:,}{cached}.")
    print_result(f"{model['flops']:.3g} FLOPs together: a multiply-add is two.")
    print_result("")
    if not model["cache_bytes"]:
        print_result("An encoder reads all tokens at once: there is no cache.")
        return
    print_result(
        f"Keys and values in {model['cache_dtype']}: {layer['cache_bytes']:,} bytes per "
        f"token and layer, {model['cache_bytes']:,} per token, {text['cache_bytes']:,} in all."
    )


def _print_list(models: Sequence[Mapping[str, Any]]) -> None:
    """Print the known models, a line each."""
    rows = []
    for facts in models:
        sizes, model = facts["sizes"], facts["model"]
        numbers = (model["layers"], *(sizes[name] for name in ("d_model", "n_heads", "n_kv_heads")))
        weights = f"{model['weights'] / 1e6:,.1f} M"
        cache = f"{model['cache_bytes'] / 1e3:,.0f} kB" if model["cache_bytes"] else "none"
        rows.append([facts["name"], *map(str, numbers), weights, f"{model['share']:.0%}", cache])
    names = ["model", "layers", "d_model", "heads", "kv", "weights", "share", "cache"]
    _print_columns(names, rows)
    print_result(
        "Weights of attention and their share of the model; cache bytes per token, in --dtype."
    )


def _print_columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns of numbers at full width: a narrow terminal wraps lines, but cuts no number."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(names[0], box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in names[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=1000).print(table)
