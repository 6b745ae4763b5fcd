"""The output projection of an attention: the linear layer whose input is its heads, side by side.

It is found by data. A linear layer that receives the heads as they were computed is one, whatever
its name. Heads may also be changed on the way, as by a gate or a norm of each head; then random
numbers in place of some heads must change their own slices of the input and no others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from headwise.capture import AttentionCall, Site, capture_calls
from headwise.errors import UnsupportedError
from headwise.models import hooked, is_sharded
from headwise.ownership._model_runs import float_outputs, random_like

_BATCH_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_ONLY_WATCH = "Watch this model without editing its heads."
# Between an attention and its output projection, further linear layers make gates of its input.
_LINEAR_LAYERS = 4


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
    def n_groups(self) -> int:
        """In how many groups it maps heads, each by rows of its own (DeepSeek-V4); 1 for most."""
        return _groups_of(self.module)

    def split(self, x: Shaped[Tensor, "... n"]) -> Shaped[Tensor, "... H Dv"]:
        """The heads in its input."""
        joined = x if self.n_groups == 1 else x.flatten(-2)
        return joined.reshape(*joined.shape[:-1], self.n_heads, -1)

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

        Raises:
            UnsupportedError: heads are mapped in groups.
        """
        if self.n_groups > 1:
            raise UnsupportedError(
                f"heads: {self.name} maps heads in {self.n_groups} groups, which share the columns "
                f"of its weight, so that no head can be cut out by itself. Ablate heads instead."
            )
        weight = self.weight if self.in_axis == 0 else self.weight.T
        return weight.view(self.n_heads, -1, weight.shape[1])


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


def _groups_of(module: nn.Module) -> int:
    n_groups = getattr(module, "n_groups", 1)
    return n_groups if isinstance(n_groups, int) else 1


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm, which may keep statistics of its channels."""
    return isinstance(module, _BATCH_NORMS)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is `[in, out]`, as in the Conv1D of transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class _LinearCall(NamedTuple):
    """A call of a linear layer that may be the output projection."""

    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(eq=False)
class HeadsOfCall:
    """The heads of one call of an attention, and the modules that received them.

    Attributes:
        keys: What they attended to.
        outputs: What the heads computed; None once it cannot reach further modules.
        receivers: The modules whose input was these outputs, in the order of their calls.
        linear_calls: The first calls of linear layers after the attention whose input has as many
            numbers, unless one has received the heads as they are.
    """

    site: Site
    module: nn.Module
    nth: int
    keys: Float[Tensor, "B Hkv S D"]
    outputs: Float[Tensor, "B T H Dv"] | None
    receivers: dict[nn.Module, None] = field(default_factory=dict)
    linear_calls: list[_LinearCall] = field(default_factory=list)

    @property
    def n_texts(self) -> int:
        return len(self.keys)

    def note_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note a module that is called with the heads side by side, as they were computed."""
        heads = self.outputs
        # By value: models transpose, join and copy heads on the way, which leaves no identity.
        if heads is not None and _fits(heads, args) and args[0].reshape(heads.shape).equal(heads):
            self.receivers.setdefault(module)

    def note_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note a linear layer that may have received heads that were changed on the way."""
        heads, is_decided = self.outputs, [module] == [*self.receivers]
        if heads is None or is_decided or len(self.linear_calls) == _LINEAR_LAYERS:
            return
        if not isinstance(output, Tensor):  # a router's, of a subclass of a linear layer
            return
        if is_whole_linear(module) and _fits(heads, args, _groups_of(module)):
            # Copies, since models add residuals in place.
            self.linear_calls.append(_LinearCall(module, args[0].clone(), output.clone()))


def _fits(heads: Float[Tensor, "B T H Dv"], args: tuple[Any, ...], n_groups: int = 1) -> bool:
    """Whether the first argument of a module may be these heads side by side."""
    if not args or not isinstance(args[0], Tensor):
        return False
    width = args[0].shape[-1] * n_groups
    return args[0].numel() == heads.numel() and width == heads[0, 0].numel()


# The output projection, or None and why there is none.
Found = tuple[nn.Module | None, str]


def find_projections(
    model: nn.Module, batch: Any, calls: Sequence[HeadsOfCall], outputs: list[Tensor]
) -> list[Found]:
    """Find the one linear layer that the heads of each attention go into.

    Args:
        calls: Every attention call of the model, in order, from a pass over the batch.
        outputs: What this pass returned.
    """
    trial = _Trial(model, batch, calls, outputs, {m: name for name, m in model.named_modules()})
    found = {heads: trial.by_receivers(heads) for heads in calls}
    undecided = trial.by_change([heads for heads in calls if found[heads] == (None, "")])
    return [undecided.get(heads, found[heads]) for heads in calls]


@dataclass(frozen=True)
class _Trial:
    """A model, and passes over a batch in which some of its heads are random numbers.

    Attributes:
        names: The names of its modules.
    """

    model: nn.Module
    batch: Any
    calls: Sequence[HeadsOfCall]
    outputs: list[Tensor]
    names: Mapping[nn.Module, str]

    def by_receivers(self, heads: HeadsOfCall) -> Found:
        """What the modules that received the heads as they are decide; (None, "") for nothing."""
        # What reads the output of an identity is noted by itself.
        receivers = [x for x in heads.receivers if not isinstance(x, nn.Identity)]
        linear = [*filter(is_whole_linear, receivers)]
        if isinstance(heads.module, nn.MultiheadAttention):  # which never calls its projection
            return heads.module.out_proj, ""
        for module in (*receivers, *(call.module for call in heads.linear_calls)):
            if type(module).__module__.startswith("peft.tuners."):
                kind = type(module).__module__.split(".")[2]
                return None, (
                    f"its heads go into {self.names[module]}, an adapter ({kind}). Merge it "
                    f"first, as merge_and_unload() does where PEFT can."
                )
        if len(linear) > 1:
            both = " and ".join(map(self._described, linear))
            return None, f"its heads go into {both}. {_ONLY_WATCH}"
        if linear or not receivers:
            return (linear[0] if linear and linear == receivers else None), ""
        tensors = [*receivers[-1].parameters(), *receivers[-1].buffers()]
        into = f"its heads go into {self._described(receivers[-1])}."
        if any(map(is_sharded, tensors)):
            return None, f"{into} This process holds a part of its weight: gather it first."
        if any(not x.is_floating_point() for x in tensors):
            advice = "Its weights are packed: unpack them first, or load the model unquantized."
            return None, f"{into} {advice}"
        return None, ""

    def by_change(self, tested: Sequence[HeadsOfCall]) -> dict[HeadsOfCall, Found]:
        """The first linear layer whose input changes with all heads, if each of them changes its
        own slice and nothing else."""
        if not tested:
            return {}
        reached, is_whole = self._with_noise(tested, torch.ones_like)
        if not is_whole and len(tested) > 1:  # each by itself, to tell which
            return dict(chain(*(self.by_change([heads]).items() for heads in tested)))
        # Two passes for each binary digit of the numbers of heads tell any two heads apart.
        changed = [heads for heads, (module, _) in reached.items() if module not in heads.receivers]
        digits = (max([heads.site.n_heads for heads in changed], default=1) - 1).bit_length()
        mixed = set[HeadsOfCall]()
        for digit, value in product(range(digits if is_whole else 0), (0, 1)):

            def chosen(heads: Tensor, digit: int = digit, value: int = value) -> Tensor:
                return heads >> digit & 1 == value

            slices, _ = self._with_noise(changed, chosen)
            for heads in changed:
                expected = chosen(torch.arange(heads.site.n_heads))
                _, actual = slices.get(heads, (None, torch.zeros_like(expected)))
                if not actual.equal(expected):
                    mixed.add(heads)
        return {
            heads: self._judged(heads, reached.get(heads, (None,))[0], is_whole, heads in mixed)
            for heads in tested
        }

    def _judged(
        self, heads: HeadsOfCall, module: nn.Module | None, is_whole: bool, is_mixed: bool
    ) -> Found:
        if module is None and heads.receivers:
            why = f"its heads go into {self._described(next(reversed(heads.receivers)))}"
        elif module is None:
            why = "no linear layer receives its heads, as where a bare parameter multiplies them"
        elif not is_whole:
            why = (
                f"its heads do not go into {self._described(module)} alone: a bare parameter "
                f"multiplies them, or they are joined with something else or used twice"
            )
        elif is_mixed:
            name = self._described(module)
            why = (
                f"heads are mixed or moved on their way into {name}, as by a norm over all of them"
            )
        else:
            return module, ""
        return None, f"{why}. {_ONLY_WATCH}"

    @torch.no_grad()
    def _with_noise(
        self, tested: Sequence[HeadsOfCall], chosen: Callable[[Tensor], Tensor]
    ) -> tuple[dict[HeadsOfCall, tuple[nn.Module, Bool[Tensor, " H"]]], bool]:
        """Run the model with random numbers in place of some heads.

        The first linear layer whose input changes returns what it returned before, so that all
        other attentions compute the same, and the model too if the heads go nowhere else.

        Args:
            chosen: Maps the numbers of heads to which of them are replaced.
        Returns:
            By attention this layer, and which slices of its input changed; and whether the model
            returned what it returned before.
        """
        reached: dict[HeadsOfCall, tuple[nn.Module, Tensor]] = {}
        calls, later = iter(self.calls), list[_LinearCall]()
        current: HeadsOfCall | None = None

        def record(call: AttentionCall) -> None:
            nonlocal current, later
            current = next(calls)
            later = [*current.linear_calls] if current in tested else []
            if later:
                heads = call.heads.transpose(1, 2)  # of the model's own memory
                mask = chosen(torch.arange(heads.shape[2]).to(heads.device)).bool()
                noise = random_like(heads) * heads.std()
                heads[:1, :, mask] = noise[:1, :, mask]  # of the first text alone

        def compare(module: nn.Module, args: tuple[Any, ...], _: Any) -> Any:
            nonlocal later
            if current is None or not later or later[0].module is not module:
                return None
            call, *later = later
            projection = OutputProjection("", module, current.site.n_heads)
            slices = projection.split(args[0] != call.input)
            is_changed = slices.flatten(0, -3).any(-1).any(0).cpu()
            if not is_changed.any():
                return None
            if slices.reshape(current.n_texts, -1)[1:].any():  # texts lie along another axis
                is_changed = torch.ones_like(is_changed)
            reached[current], later = (module, is_changed), []
            return call.output.clone()

        linear = {call.module for heads in tested for call in heads.linear_calls}
        hooks = hooked(after=[(module, compare) for module in linear])
        with hooks, capture_calls(self.model, record):
            outputs = float_outputs(self.model, self.batch)
        pairs = zip(self.outputs, outputs, strict=True)
        # NaN, as of padding, stays NaN.
        return reached, all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)

    def _described(self, module: nn.Module) -> str:
        return f"{self.names[module]} ({type(module).__name__})"


def is_whole_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, and this process holds all of its weight."""
    return is_linear(module) and not is_sharded(module.weight)
