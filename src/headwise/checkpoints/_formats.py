"""Prepare a model for a format of `FORMATS`, and write it into an empty folder.

A model that its configuration describes is the same in each format that Transformers opens.
`_gguf.py` and `_onnx.py` write for other engines.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from string import Template
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise._choices import FORMATS
from headwise._tensors import misfits, output_errors
from headwise.checkpoints import _resize
from headwise.checkpoints._manifest import (
    MANIFEST,
    ORIGINAL,
    compose_heads,
    describe_changes,
    differences_of,
    original_heads,
    sketch,
)
from headwise.checkpoints._per_layer import write_layers
from headwise.checkpoints._resize import BiasHeads, is_bias_table
from headwise.checkpoints._torch_layer import TorchCompatibleAttention
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT
from headwise.lab import save as save_lab
from headwise.models import auto_classes, device_of
from headwise.ownership import (
    Attention,
    HeadCounts,
    KeptHeads,
    OwnershipMap,
    count_heads,
    example_input,
    find_attentions,
    find_ownership,
    kept_indices,
    spread,
)

# Equal models whose configurations accept numbers of heads that the first ones refuse.
_EQUIVALENT = {"Llama": ("Mistral", {"sliding_window": None})}
_MODULE, _WEIGHTS = "modeling_headwise", "model.safetensors"
_CLASSES = Template('''

from transformers import $config, $base


class Headwise$config($config):
    """The configuration, and what differs in single modules."""

    headwise: dict | None = None


class Headwise$base($base):
    """A $base with fewer heads, written by headwise."""

    config_class = Headwise$config

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        shrink(self, **config.headwise)

    def initialize_weights(self):
        # Transformers skips modules of custom code that hold no weights themselves, and with them
        # the buffers that such a module of its own fills in others.
        self.is_custom_code = lambda: False
        try:
            super().initialize_weights()
        finally:
            del self.is_custom_code
''')


# Writes a model into an empty folder.
Write = Callable[[Path], object]


def prepare(name: str, model: nn.Module, batch: Any = None, tokenizer: Any = None) -> Write:
    """Prepare a model for a format: whatever the format cannot hold is refused here.

    Args:
        batch: An input to run it on; None is a short made-up one.
    Returns:
        The function that writes it into a folder.
    """
    if isinstance(model, MiniGPT):
        return _as_mini_gpt(model, name)
    changes, format = describe_changes(model), FORMATS[name]
    if changes is None and format.reader == "transformers":  # its configuration describes it
        format = FORMATS["headwise"]
    function = resolve_name(f"{__package__}.{format.prepare}")
    return cast(Write, function(model, changes, batch, tokenizer))


def _as_mini_gpt(model: MiniGPT, format: str) -> Write:
    """Refuse a subclass, because a folder holds no code, and other libraries' formats."""
    if type(model) is not MiniGPT:
        raise UnsupportedError(
            f"save: {type(model).__name__} is a subclass of MiniGPT, and load would give a "
            f"MiniGPT. Keep its state_dict, and build the model again."
        )
    if format != "headwise":
        raise UnsupportedError(
            f"save: Transformers has no MiniGPT, so format={format!r} does not exist for it. "
            f"Choose 'headwise'."
        )
    cut = differences_of(model)
    cut = cut and cut | {ORIGINAL: original_heads(model)}
    return lambda folder: save_lab(model, folder, cut=cut)


def as_it_is(model: Any, changes: dict[str, Any] | None, *_: Any) -> Write:
    """The weights as they are, and `headwise.json` with what the configuration lacks."""

    def write(folder: Path) -> None:
        with output_errors(folder / _WEIGHTS):
            model.save_pretrained(folder)
        _write_manifest(model, changes, folder)

    return write


def _write_manifest(model: nn.Module, changes: dict[str, Any] | None, folder: Path) -> None:
    if changes is not None:
        content = changes | write_layers(model, changes, folder)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _converted(
    convert: Callable[[Any, Any], Any], model: Any, _: Any, batch: Any, *__: Any
) -> Write:
    _refuse_torch_layers(model)
    converted = convert(model, example_input(model) if batch is None else batch)
    if hasattr(model, "generation_config"):
        converted.generation_config = model.generation_config
    return as_it_is(converted, None)


def _refuse_torch_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, TorchCompatibleAttention):
            raise UnsupportedError(
                f"save: {name} replaces a layer of torch, which Transformers alone cannot build "
                f"with fewer heads. Choose the format 'headwise', or prune other layers."
            )


def _as_stock(model: nn.Module, batch: Any) -> nn.Module:
    """The same weights under a configuration with the number of heads that is left.

    Whether a class accepts a configuration is found by building it on the meta device: nothing
    else says which numbers of heads its checks refuse.

    Returns:
        A model to be written, not to be run.
    """
    counts, head_dim = _uniform_counts(model, batch)
    errors = []
    for cls, sizes in _candidates(model, counts, head_dim):
        try:
            return _rebuild(cls, _configuration(model, cls, sizes), model.state_dict())
        except Exception as error:  # configurations raise any exception
            lines = str(error).strip().splitlines() or [type(error).__name__]
            errors.append(lines[-1].strip(" ."))
    advice = "Choose"
    if "would be None" in errors[-1]:  # a weight without a place, such as a bias
        advice = "Prune without fold (at the command line without --text), or choose"
    raise UnsupportedError(
        f"save: no configuration builds a {type(model).__name__} of {counts.heads} heads and "
        f"{counts.kv_heads} kv heads in each layer like this one ({errors[-1]}). "
        f"{advice} the format 'padded', 'remote-code' or 'headwise'."
    )


def _rebuild(cls: Any, config: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a model from a configuration and give it these weights; to be written, not to be run.

    Biases that are missing among the weights are zeros.
    """
    built = sketch(cls, config)
    expected = built.state_dict()
    new_biases = {name for name in expected.keys() - weights.keys() if name.endswith("bias")}
    for name, shape, needed in misfits(weights, expected):
        if name not in new_biases:
            raise ValueError(f"{name} is {shape} and would be {needed}")
    like = next(iter(weights.values()))
    zeros = {name: like.new_zeros(expected[name].shape) for name in new_biases}
    built.load_state_dict({**weights, **zeros}, assign=True)
    return built


def _uniform_counts(model: nn.Module, batch: Any) -> tuple[HeadCounts, int]:
    """The number of heads that every layer has, and their dimension."""
    attentions = find_attentions(model, batch)
    maps = find_ownership(model, attentions, batch)
    counts = {a.site.name: count_heads(a, maps[a]) for a in attentions}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{count.heads} in {name}" for name, count in counts.items())
        fewest = min(attentions, key=lambda a: counts[a.site.name].heads)
        head_dim = fewest.output.per_head.shape[1]
        fits = _fits_stock(model, fewest.site.name, counts[fewest.site.name], head_dim)
        raise UnsupportedError(
            f"save: stock Transformers needs the same number of heads in each layer, but there "
            f"are {listed}. Choose the format 'padded', 'remote-code' or 'headwise'"
            f"{', or hw.plan(..., uniform=True)' if fits else ''}."
        )
    first = attentions[0]
    return counts[first.site.name], first.output.per_head.shape[1]


def _fits_stock(model: nn.Module, layer: str, counts: HeadCounts, head_dim: int) -> bool:
    """Whether a configuration of so many heads in each layer builds this layer as it is."""
    weights = {n: x for n, x in model.state_dict().items() if n.startswith(f"{layer}.")}
    for cls, sizes in _candidates(model, counts, head_dim):
        with suppress(Exception):  # configurations raise any exception
            expected = sketch(cls, _configuration(model, cls, sizes)).state_dict()
            if not [*misfits(weights, {name: expected[name] for name in weights})]:
                return True
    return False


def _candidates(
    model: nn.Module, counts: HeadCounts, head_dim: int
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Model classes, each with changes of its configuration; the closest ones first."""
    import transformers

    config: Any = model.config
    sizes: dict[str, Any] = {"num_attention_heads": counts.heads}
    if hasattr(config, "num_key_value_heads"):
        sizes["num_key_value_heads"] = counts.kv_heads
    for bias in _with_and_without_bias(config):
        for explicit in ({}, {"head_dim": head_dim}):
            yield type(model), sizes | explicit | bias
    name = type(model).__name__
    for family, (equivalent, more) in _EQUIVALENT.items():
        if name.startswith(family):
            cls = getattr(transformers, name.replace(family, equivalent, 1), None)
            if cls is not None:
                yield cls, sizes | {"head_dim": head_dim} | more


def _with_and_without_bias(config: Any) -> list[dict[str, Any]]:
    """A folded mean is a bias of the output projection, for which some configurations have a
    flag."""
    return [{}, {"attention_bias": True}] if hasattr(config, "attention_bias") else [{}]


def _configuration(model: nn.Module, cls: Any, sizes: Mapping[str, Any]) -> Any:
    """The configuration of a model with other sizes, converted to that of `cls`."""
    config: Any = model.config
    content = config.to_dict()
    if cls.config_class is not type(config):
        known = cls.config_class().to_dict().keys() - {"model_type", "architectures"}
        content = {name: x for name, x in content.items() if name in {*known, ORIGINAL}}
    names = cls.config_class.attribute_map
    return cls.config_class.from_dict(
        content | {names.get(name, name): value for name, value in sizes.items()}
    )


def _as_padded(model: nn.Module, batch: Any) -> nn.Module:
    """The model that the configuration builds, with the outputs of the pruned one.

    It is as large and as slow as the model was before pruning.

    Returns:
        A model to be written, not to be run.
    """
    cls: Any = type(model)
    config: Any = model.config
    with torch.random.fork_rng():  # building draws random weights, which are not used
        full = cls(config).to(device_of(model))
    weights = {name: x.detach() for name, x in model.state_dict().items()}
    full_attentions = find_attentions(full, batch)
    maps = find_ownership(full, full_attentions, batch)
    kept: dict[nn.Module, Sequence[int]] = {}
    layers: dict[tuple[str, int], list[int | None]] = {}
    for attention, larger in zip(find_attentions(model, batch), full_attentions, strict=True):
        site = attention.site
        if attention.nth == 0:
            padded, kept[attention.module] = _pad(weights, attention, larger, maps[larger])
            weights |= padded
        pruned = {head: number for number, head in enumerate(kept[attention.module])}
        layers[site.stack, site.layer] = [pruned.get(head) for head in range(larger.site.n_heads)]
    original = {ORIGINAL: compose_heads(model, layers)} if original_heads(model) else {}
    for bias in _with_and_without_bias(config):
        try:
            content = config.to_dict() | original | bias
            return _rebuild(cls, cls.config_class.from_dict(content), weights)
        except ValueError as error:
            why = error
    raise UnsupportedError(
        f"save: {cls.__name__} has no place for all of its weights at its old size ({why}): "
        f"prune without fold, or choose the format 'headwise' or 'remote-code'."
    )


def _pad(
    weights: Mapping[str, Tensor],
    attention: Attention,
    larger: Attention,
    maps: Sequence[OwnershipMap],
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The weights of an attention spread over those of the larger one: cutting in reverse.

    Returns:
        The weights, and for each head its number in the larger attention.
    """
    counts = count_heads(larger, maps)
    held = [owners for owners in maps if owners.name in weights]
    if BiasHeads.on(attention.module) is not None:  # the biases of the stack were not cut
        held = [owners for owners in held if not is_bias_table(owners.name)]
    sizes = [weights[owners.name].shape[owners.axis] for owners in held]
    for kept in _placements(attention, counts):
        indices = [kept_indices(owners, counts, kept) for owners in held]
        if [len(index) for index in indices] == sizes:
            padded = {owners.name: weights[owners.name] for owners in held}
            for owners, index in zip(held, indices, strict=True):
                padded[owners.name] = spread(padded[owners.name], owners, index)
            return padded, kept.heads
    raise UnsupportedError(
        f"save: {attention.site} has more kv heads than the {counts.kv_heads} that its "
        f"configuration gives room for. Choose the format 'headwise' or 'remote-code'."
    )


def _placements(attention: Attention, counts: HeadCounts) -> Iterator[KeptHeads]:
    """The heads of the larger attention that may hold those of the pruned one.

    Heads with position biases of their own keep their numbers; others may fill groups.
    """
    bias_heads, n_heads = BiasHeads.on(attention.module), attention.site.n_heads
    group = counts.heads // counts.kv_heads
    if bias_heads is not None:
        kv_heads = sorted({head // group for head in bias_heads.heads})
        yield KeptHeads(tuple(bias_heads.heads), tuple(kv_heads))
    for n_kv_heads in range(counts.kv_heads, 0, -1):
        size = n_heads // n_kv_heads
        if size * n_kv_heads == n_heads and size <= group:
            heads = (kv * group + nth for kv in range(n_kv_heads) for nth in range(size))
            yield KeptHeads(tuple(heads), tuple(range(n_kv_heads)))


def with_code(model: Any, changes: dict[str, Any], *_: Any) -> Write:
    """As "headwise", and the code with which `from_pretrained(trust_remote_code=True)` opens it."""
    _refuse_torch_layers(model)
    base, config = type(model), type(model.config)
    opened_by = auto_classes(base, config)
    if not opened_by:
        raise UnsupportedError(
            f"save: no AutoModel of Transformers opens a {base.__name__}. Choose the format "
            f"'headwise' or 'padded'."
        )
    names = {"base": base.__name__, "config": config.__name__}
    code = inspect.getsource(_resize) + _CLASSES.substitute(names)
    classes = {"AutoConfig": f"{_MODULE}.Headwise{config.__name__}"}
    classes |= dict.fromkeys(opened_by, f"{_MODULE}.Headwise{base.__name__}")
    entries = {
        "architectures": [f"Headwise{base.__name__}"],
        "auto_map": classes,
        "headwise": {name: changes[name] for name in ("tensors", "counts", "heads")},
    }

    def write(folder: Path) -> None:
        # Transformers translates no weight names for foreign classes: those in memory are written.
        with output_errors(folder / _WEIGHTS):
            model.save_pretrained(folder, save_original_format=False)
        (folder / f"{_MODULE}.py").write_text(code, "utf-8")
        path = folder / "config.json"
        content = json.loads(path.read_text("utf-8")) | entries
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        _write_manifest(model, changes, folder)

    return write


# A configuration that says how many heads are left; the old one, and zeros for removed heads.
as_stock, as_padded = partial(_converted, _as_stock), partial(_converted, _as_padded)
