"""The attentions of a model, each with the output projection that mixes its heads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.capture import AttentionCall, Site, capture_calls
from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.models import Hooks, check_weights, hooked, is_sharded
from headwise.ownership._model_runs import example_input, float_tensors, run
from headwise.tables import Head, HeadsLike, resolve_heads

# Its usual names, beside the other projections or, in BERT and its relatives, one module above. A
# watch needs them, since it asks for the weight before any module has received the heads.
_NAMES = (
    "o_proj", "out_proj", "c_proj", "out_lin", "Wo", "o", "dense", "wo",
    "proj", "to_out.0", "to_out", "projection", "proj_out", "output_proj", "linear_out",
)  # fmt: skip
_NAMES_ABOVE = ("output.dense", "out_proj")

_BATCH_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_ONLY_WATCH = "Watch this model without editing its heads."
_NO_PROJECTION = "heads: {} has no output projection of its own that is a plain linear layer: {}"


@dataclass(frozen=True)
class OutputProjection:
    """The linear map that mixes the outputs of the heads of one attention.

    Attributes:
        name: Its qualified name in the model.
        module: An `nn.Linear`, or a `Conv1D` of transformers, whose weight is transposed.
        n_heads: How many heads share its inputs, `v_head_dim` consecutive ones each.
    """

    name: str
    module: nn.Module
    n_heads: int

    @property
    def in_axis(self) -> int:
        """The axis of the weight that corresponds to its inputs."""
        return 0 if is_transposed(self.module) else 1

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.get_parameter("weight")
        return weight

    @property
    def bias(self) -> Float[Tensor, " d_model"] | None:
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    @property
    def per_head(self) -> Float[Tensor, "H Dv d_model"]:
        """The weight per head: head `h` adds `heads_h @ per_head[h]` to the output.

        A view: writing into it changes the model.
        """
        weight = self.weight if self.in_axis == 0 else self.weight.T
        return weight.view(self.n_heads, -1, weight.shape[1])


def output_projection(model: nn.Module, site: Site) -> OutputProjection | None:
    """The output projection of a site, found by its name; None if it has no usual one.

    `find_attentions` finds it by its input, whatever its name, and needs a pass for that.

    Also None if the module computes more than a linear map of its weight, as under an adapter or
    when packed by quantization, or if this process has a part of the weight only.
    """
    above = site.name.rpartition(".")[0]
    candidates = [(site.name, name) for name in _NAMES]
    candidates += [(above, name) for name in _NAMES_ABOVE]
    for parts in candidates:
        name = ".".join(part for part in parts if part)
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if is_sharded(getattr(module, "weight", None)) or not is_linear(module):
            return None
        projection = OutputProjection(name, module, site.n_heads)
        return (
            projection if projection.weight.shape[projection.in_axis] % site.n_heads == 0 else None
        )
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by its weight and adds its bias."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        return False
    if is_transposed(module):
        return True
    # Packed weights have another shape than the module says.
    return isinstance(module, nn.Linear) and weight.shape == (
        module.out_features,
        module.in_features,
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm, which may keep statistics of its channels."""
    return isinstance(module, _BATCH_NORMS)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is `[in, out]`, as in the Conv1D of transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@dataclass(frozen=True)
class Attention:
    """An attention of a model, with its output projection.

    Attributes:
        site: Where it is, and how many heads it has.
        module: The module that computes the attention.
        projection: The output projection that mixes its heads; None if none was found.
        nth: Which call of the module in one pass it is, if layers share their weights.
        rows: In how many rows it attended in the pass that found it; more than there are texts
            if windows or frames of a text are rows of their own.
        unprojected: Why it has no output projection, and what can be done.
        lender: The site of the earlier layer whose keys it attends to; None if it has its own.
    """

    site: Site
    module: nn.Module
    projection: OutputProjection | None
    nth: int
    rows: int = field(default=1, compare=False)
    unprojected: str = field(default="", compare=False)
    lender: Site | None = field(default=None, compare=False)

    @property
    def output(self) -> OutputProjection:
        """The output projection, for whatever needs its weights."""
        if self.projection is None:
            raise UnsupportedError(_NO_PROJECTION.format(self.site.name, self.unprojected))
        return self.projection

    @property
    def around(self) -> str:
        """The name of the smallest module with both the attention and its output projection."""
        pairs = zip(self.site.name.split("."), self.output.name.split("."), strict=False)
        return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def called(self) -> bool:
        """Whether the output projection is called as a module; torch's own layer never calls it."""
        return not isinstance(self.module, nn.MultiheadAttention)


@dataclass
class _Heads:
    """The heads of one call of an attention, and the modules that received them.

    Attributes:
        keys: What they attended to.
        outputs: What the heads computed; None once it cannot reach further modules.
        receivers: The modules whose input was these outputs, in the order of their calls, each
            with its arguments.
    """

    site: Site
    module: nn.Module
    nth: int
    keys: Float[Tensor, "B Hkv S D"]
    outputs: Float[Tensor, "B T H Dv"] | None
    receivers: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a module that is called with the heads side by side, as they were computed."""
        heads = self.outputs
        if heads is None or not args or not isinstance(args[0], Tensor):
            return
        # By value: models transpose, join and copy heads on the way, which leaves no identity.
        fits = args[0].numel() == heads.numel() and args[0].shape[-1] == heads[0, 0].numel()
        if fits and args[0].reshape(heads.shape).equal(heads):
            self.receivers.setdefault(module, (args, kwargs))


def find_attentions(
    model: nn.Module, batch: Any = None, *, needs_projections: bool = True
) -> list[Attention]:
    """Find the attentions of a model by running it once.

    The model runs in evaluation mode, without gradients, and is not changed. The output projection
    of an attention is the linear layer that receives the outputs of its heads, whatever its name.

    Args:
        model: Any model that `observe` can watch.
        batch: Its inputs: keyword arguments, a tuple of arguments, or a single argument. None
            generates a short example input.
        needs_projections: Whether an attention without an output projection that is a module,
            such as one whose `W_O` is a bare parameter, is refused.
    Raises:
        ArgumentError: no batch is given and none can be generated.
        UnsupportedError: no attention was captured, or no plain linear layer receives the outputs
            of heads.
    """
    check_weights("heads", model, offloaded=True)
    batch = example_input(model) if batch is None else batch
    calls = list[_Heads]()

    def record(call: AttentionCall) -> None:
        site = active.site_of(call)
        if any(known.site == site for known in calls):
            raise UnsupportedError(
                f"heads: {site.name} attends several times in one pass, so edits of its heads "
                f"are ambiguous. Watch this model without editing its heads."
            )
        # Heads that a linear layer has mixed go no further, so that by the next attention they need
        # not be kept and compared with the inputs of all modules.
        for known in calls:
            if any(map(_is_whole_linear, known.receivers)):
                known.outputs = None
        nth = sum(known.module is call.module for known in calls)
        calls.append(_Heads(site, call.module, nth, call.k, call.heads.transpose(1, 2)))

    def check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for heads in calls:
            heads.note(module, args, kwargs)

    with in_evaluation(model):
        with Hooks() as hooks:
            active = hooks.enter_context(capture_calls(model, record))
            for module in model.modules():
                # Before all other hooks, which may edit the heads.
                hooks.before(module, check_inputs, prepend=True, with_kwargs=True)
            run(model, batch)
        attentions = [
            _with_projection(model, heads, calls[:index]) for index, heads in enumerate(calls)
        ]
    attentions = _without_shared_projections(attentions)
    if not attentions:
        raise UnsupportedError(
            f"heads: no attention was captured in {type(model).__name__}. Give a model "
            f"that headwise.observe can watch."
        )
    if needs_projections:
        for attention in attentions:
            _ = attention.output  # which raises
    return attentions


def _without_shared_projections(attentions: list[Attention]) -> list[Attention]:
    """The attentions, without projections that mix heads of several modules: it is unknown whose
    heads a call of one receives."""
    result = []
    for attention in attentions:
        projection = attention.projection
        others = [
            other.site.name
            for other in attentions
            if projection is not None
            and other.projection is not None
            and other.projection.module is projection.module
            and other.module is not attention.module
        ]
        if projection is not None and others:
            why = f"its heads and those of {others[0]} go into {projection.name}. {_ONLY_WATCH}"
            attention = replace(attention, projection=None, unprojected=why)
        result.append(attention)
    return result


def _with_projection(model: nn.Module, heads: _Heads, earlier: Sequence[_Heads]) -> Attention:
    """The attention, with the linear layer that its heads went into, or why there is none."""
    names = {module: name for name, module in model.named_modules()}
    module, why = _mixing_module(names, heads)
    n_heads = heads.site.n_heads
    projection = None if module is None else OutputProjection(names[module], module, n_heads)
    # Layers that share keys hand on the very tensor; equal values alone could be chance.
    keys = heads.keys.data_ptr()
    lenders = [other.site for other in earlier if keys and other.keys.data_ptr() == keys]
    lender = lenders[0] if lenders else None
    rows = len(heads.keys)
    return Attention(heads.site, heads.module, projection, heads.nth, rows, why, lender)


def _mixing_module(names: Mapping[nn.Module, str], heads: _Heads) -> tuple[nn.Module | None, str]:
    """The one linear layer that heads went into, or else what was found and what can be done."""
    receivers = [*heads.receivers]
    if isinstance(heads.module, nn.MultiheadAttention):
        receivers = [heads.module.out_proj]
    for layer in names:
        if isinstance(layer, MultiHeadAttention) and layer.attention is heads.module:
            receivers = [layer.out_proj]  # its gate scales heads on the way, each by itself
    if not receivers:
        return None, (
            "no module receives its heads as they are. They are changed on the way, as by a gate "
            f"or a norm, or multiplied by a bare parameter. {_ONLY_WATCH}"
        )
    found = [f"{names[module]} ({type(module).__name__})" for module in receivers]
    adapters = [m for m in receivers if type(m).__module__.startswith("peft.tuners.")]
    if adapters:
        kind = type(adapters[0]).__module__.split(".")[2]
        return None, (
            f"its heads go into {names[adapters[0]]}, an adapter ({kind}). Merge it first, as "
            f"merge_and_unload() does where PEFT can."
        )
    linear = [module for module in receivers if _is_whole_linear(module)]
    if len(linear) > 1:
        both = " and ".join(found[receivers.index(module)] for module in linear)
        return None, f"its heads go into {both}. {_ONLY_WATCH}"
    if not linear:
        last = receivers[-1]
        tensors = [*last.parameters(), *last.buffers()]
        advice = _ONLY_WATCH
        if any(map(is_sharded, tensors)):
            advice = "This process holds a part of its weight: gather it first."
        elif any(not x.is_floating_point() for x in tensors):
            advice = "Its weights are packed: unpack them first, or load the model unquantized."
        return None, f"its heads go into {found[-1]}. {advice}"
    outer = next((m for m in receivers if m is not linear[0] and linear[0] in m.modules()), None)
    if outer is not None and not _reads_through(outer, *heads.receivers[outer], linear[0]):
        name = found[receivers.index(outer)]
        return None, f"{name} uses its heads beside {names[linear[0]]}. {_ONLY_WATCH}"
    return linear[0], ""


@torch.no_grad()
def _reads_through(
    outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], linear: nn.Module
) -> bool:
    """Whether the output of a module depends on its first input through a linear layer alone."""
    # The module runs on one input, and then on another one with the first put before the linear
    # layer: the outputs are equal if nothing of the second went around it.
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(args[0].shape, generator=generator).to(args[0]) for _ in "ab")

    def replace_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return first.view(inputs[0].shape), *inputs[1:]

    expected = outer(first, *args[1:], **kwargs)
    with hooked(before=[(linear, replace_input)]):
        actual = outer(second, *args[1:], **kwargs)
    pairs = zip(float_tensors(expected), float_tensors(actual), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def _is_whole_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, and this process holds all of its weight."""
    return is_linear(module) and not is_sharded(module.weight)


def heads_of(attentions: Iterable[Attention]) -> list[Head]:
    """The address of every head, in the order in which the attentions run."""
    return [head for attention in attentions for head in attention.site.heads()]


def by_attention(heads: HeadsLike, attentions: list[Attention]) -> dict[Attention, list[int]]:
    """The chosen heads of each attention; attentions without any are left out."""
    by_layer = {(a.site.stack, a.site.layer): a for a in attentions}
    chosen: dict[Attention, list[int]] = {}
    for head in sorted(resolve_heads(heads, heads_of(attentions))):
        chosen.setdefault(by_layer[head.stack, head.layer], []).append(head.head)
    return chosen
