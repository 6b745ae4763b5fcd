"""The model that a caller gives: checked and unwrapped, and the device that it runs on."""

import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from reprlib import repr as shortened
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headwise._display import first_line
from headwise._torch_private import compiled_function, wrapped_by_compiler
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models._transformers_private import offload_hooks

# The models of sentence-transformers; those that give one vector for a text come first.
_SENTENCE_MODELS = ("SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder")
# The transformer in one that saves it at the root of its folder; the last is in a CrossEncoder of
# versions before 6.
_TRANSFORMERS = ("0.model", "0.auto_model", "model")
# The key of a configuration that says what kind of quantized weights the floats were read from.
WEIGHTS_FROM = "weights_from"
_TOKEN_OUTPUTS = ("last_hidden_state", "logits")


def check_model(caller: str, model: Any) -> nn.Module:
    """The model itself, the transformer in a model of sentence-transformers, or what was compiled.

    Args:
        caller: The name of the calling function, for error messages.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{caller}: the model is {shortened(model)}. Give a module; headwise.load opens a "
            f"folder or a hub name."
        )
    model = without_compiler(model)
    if not is_sentence_transformer(model):
        return model
    return model.get_submodule(transformer_name(model, caller))


def weights_from(model: nn.Module) -> str:
    """The kind of quantized weights that a model was read from, such as Q4_1; empty for floats."""
    kind = getattr(getattr(model, "config", None), WEIGHTS_FROM, "")
    return kind if isinstance(kind, str) else ""


def class_of(model: nn.Module) -> str:
    """The name of a model's class, and what its weights were read from."""
    kind, name = weights_from(model), type(model).__name__
    return f"{name} from {kind}" if kind else name


def check_weights(caller: str, model: nn.Module, *, offloaded: bool = False) -> None:
    """Refuse a model whose weights have no values here.

    Args:
        offloaded: Whether weights that accelerate loads for each call of a module will do.
    """
    name = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if name is None:
        return
    if not any(offload_hooks(module) for module in model.modules()):
        raise UnsupportedError(
            f"{caller}: {name} has no values: it is on the meta device. Load the weights first."
        )
    if not offloaded:
        raise UnsupportedError(
            f"{caller}: {name} is offloaded by accelerate, which loads it for each call alone. "
            f"Load the weights first: open the model without offloading."
        )


def is_sentence_transformer(model: Any, *, embeds: bool = False) -> bool:
    """Whether a model is one of sentence-transformers, without importing the package.

    Args:
        embeds: Whether it must give one vector for a text.
    """
    # An object of these classes can only exist if their package has been imported.
    package = sys.modules.get("sentence_transformers")
    names = _SENTENCE_MODELS[:2] if embeds else _SENTENCE_MODELS
    classes = (getattr(package, name, None) for name in names)
    return isinstance(model, tuple(cls for cls in classes if cls is not None))


def transformer_name(model: nn.Module, caller: str) -> str:
    """The name of the transformer in a model of sentence-transformers."""
    names = [name for name, _ in model.named_modules() if name in _TRANSFORMERS]
    if not names:
        kinds = ", ".join(type(module).__name__ for module in model.children())
        raise UnsupportedError(
            f"{caller}: this {type(model).__name__} of {kinds} does not begin with a transformer. "
            f"Give the transformer inside it."
        )
    return names[0]


def model_inputs(batch: Any) -> Any:
    """A batch without the entry `modality` that sentence-transformers adds to it.

    Tensors that were made under `inference_mode` are copied outside of it, for gradients.
    """
    if isinstance(batch, Tensor):
        gradients = not torch.is_inference_mode_enabled()
        return batch.clone() if gradients and batch.is_inference() else batch
    if isinstance(batch, tuple):
        return tuple(model_inputs(part) for part in batch)
    if not isinstance(batch, Mapping):
        return batch
    no_input = ("modality",) if isinstance(batch.get("modality"), str) else ()
    read = {name: model_inputs(x) for name, x in batch.items() if name not in no_input}
    # An output of a model, such as `encoder_outputs`, is read by number too.
    return type(batch)(**read) if hasattr(batch, "to_tuple") else read


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that a `PeftModel` wraps, adapters in its layers; any other model as it is."""
    base: Callable[[], nn.Module] = getattr(model, "get_base_model", lambda: model)
    return base()


def without_compiler(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, which shares its weights; else the model itself."""
    inner = wrapped_by_compiler(model) if isinstance(model, nn.Module) else None
    return model if inner is None else inner


def device_of(model: nn.Module) -> torch.device:
    """The device of the first weight, or where Accelerate runs a model that it has offloaded."""
    weights = [*model.parameters()]
    devices = [weight.device for weight in weights if not weight.is_meta]
    if len(devices) == len(weights) and devices:
        return devices[0]
    for module in model.modules():
        for hook in offload_hooks(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return devices[0] if devices else torch.device("cpu")


def check_device(device: str | torch.device, option: str) -> torch.device:
    """The device, after a tensor was written to it and read back."""
    try:
        with warnings.catch_warnings():  # deprecated device names warn
            warnings.simplefilter("ignore")
            probe = torch.zeros(1, device=device)
            probe.cpu()  # fails on the meta device
            return probe.device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ArgumentError(
            f"{option}: {str(device)!r} cannot be used here ({first_line(error)}). Leave it out "
            f"for the CPU."
        ) from error


def around(model: nn.Module, inner: nn.Module) -> nn.Module:
    """A copy of a model of sentence-transformers around another transformer, itself not copied."""
    return copy_model("around", model, {id(check_model("around", model)): inner})


def copy_model(caller: str, model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model, whose modules run the `forward` of their class.

    A function that stands in for it on a module, as `torch.compile(model.forward)`, is not copied
    with the module: in the copy it would run the module that it was made for.

    Args:
        memo: What stands for some objects in the copy, by their ids, as in `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    copied = deepcopy(model, memo)
    for name, module in model.named_modules():
        own, copy = vars(module).get("forward"), memo.get(id(module))
        if own is None or copy is None or vars(copy).get("forward") is not own:
            continue
        if compiled_function(own) != MethodType(type(module).forward, module):
            of = name or type(module).__name__
            raise UnsupportedError(
                f"{caller}: the forward of {of} was replaced by {shortened(own)}, which would run "
                f"{of} itself in a copy of the model. Delete it (del module.forward) before, or "
                f"replace it by a method (types.MethodType)."
            )
        del copy.forward
    return copied


def sentence_embedding(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> Tensor:
    """The vector of each text that a model of sentence-transformers makes of its transformer's
    output."""
    first, *modules = model.children()
    settings = getattr(first, "modality_config", {}).get("text", {})
    # Of one vector for each token, or in a SparseEncoder the logits of the whole vocabulary.
    known = next((name for name in _TOKEN_OUTPUTS if hasattr(output, name)), "")
    name = settings.get("method_output_name", known)
    if settings.get("method", "forward") != "forward" or name not in (known, [known], (known,)):
        raise UnsupportedError(
            f"loss: this {type(model).__name__} embeds {name!r} of its transformer, and not the "
            f"last layer. Give loss=, a function of the transformer's output and the batch."
        )
    features: Any = {**batch, "token_embeddings": getattr(output, known)}
    # A pooling that works in place changes what its gradient needs: each step keeps a copy.
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        for module in modules:
            features = module(features)
    return features["sentence_embedding"]
