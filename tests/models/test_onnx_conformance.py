"""The operator `Attention` of ONNX: its own 93 cases, by the definition and by each kernel.

One adapter translates a case into the arguments of this library; ONNX's own code compares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case import node
from onnx.backend.test.runner import Runner

from headwise import reference
from headwise.kernels import attend

Arrays = Mapping[str, np.ndarray]
# Takes arrays q, k, v and what `attend` takes; gives heads, weights and log-sum-exp.
Engine = Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """One case: inputs and outputs by their names in the operator, and its settings."""

    name: str
    inputs: Arrays
    outputs: Arrays
    settings: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)


@cache
def cases() -> tuple[Case, ...]:
    """All cases but the expanded ones, which have the same data for a graph of small operators."""
    # All operators would be imported, which make the data of their cases for ten seconds.
    with patch.object(
        node, "import_recursive", lambda _: import_module(f"{node.__name__}.attention")
    ):
        collected = node.collect_testcases("Attention")
    return tuple(_read(case) for case in collected if not case.name.endswith("_expanded"))


def _read(case: Any) -> Case:
    (node,) = case.model.graph.node
    inputs, outputs = case.data_sets[0]
    schema = onnx.defs.get_schema("Attention")

    def named(parameters: Any, used: Any, arrays: Any) -> Arrays:
        values = iter(arrays)
        return {p.name: next(values) for p, name in zip(parameters, used, strict=False) if name}

    return Case(
        name=case.name,
        inputs=named(schema.inputs, node.input, inputs),
        outputs=named(schema.outputs, node.output, outputs),
        settings={a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
    )


def answer(case: Case, engine: Engine) -> Arrays:
    """What the operator gives for a case, computed by an engine."""
    q, k, v = (_split(case, name) for name in ("Q", "K", "V"))
    if "past_key" in case.inputs:
        k = np.concatenate([case.inputs["past_key"], k], axis=2)
        v = np.concatenate([case.inputs["past_value"], v], axis=2)
    options = _rule(case, q.shape[2], k.shape[2])
    plain = {"scale": case.settings.get("scale"), "softcap": case.get("softcap", 0.0) or None}
    heads, weights, _ = engine(q, k, v, **plain, **options)
    if case.inputs["Q"].ndim == 3:
        heads = heads.swapaxes(1, 2).reshape(*case.inputs["Q"].shape[:2], -1)
    outputs = {"Y": heads, "present_key": k, "present_value": v, "qk_matmul_output": weights}
    mode = case.get("qk_matmul_output_mode", 0)
    if "qk_matmul_output" in case.outputs and mode < 3:
        # Logits are the logs of the weights, up to what the softmax divided by.
        wide = (x.astype(np.float64) for x in (q, k, v))
        plain["softcap"] = plain["softcap"] if mode else None
        _, weights, lse = engine(*wide, **plain, **(options if mode == 2 else {}))
        with np.errstate(divide="ignore"):
            outputs["qk_matmul_output"] = (np.log(weights) + lse[..., None]).astype(q.dtype)
    return {name: outputs[name] for name in case.outputs}


def _split(case: Case, name: str) -> np.ndarray:
    """Split concatenated heads into an axis."""
    x = case.inputs[name]
    if x.ndim == 4:
        return x
    heads = case.get("q_num_heads" if name == "Q" else "kv_num_heads", None)
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _rule(case: Case, T: int, S: int) -> dict[str, Any]:
    """Which keys a query may attend to, and what is added to its logits."""
    options = _positions(case, T, S)
    mask = case.inputs.get("attn_mask")
    if mask is None:
        return options
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
    if mask.dtype == bool:
        visible = _four(np.pad(mask, missing, constant_values=False))
        return options | {"mask": options.get("mask", True) & visible}
    return options | {"bias": _four(np.pad(mask, missing, constant_values=-np.inf))}


def _positions(case: Case, T: int, S: int) -> dict[str, Any]:
    """What position forbids: ONNX lets queries begin at an offset that it finds in the caches."""
    left, right = (case.get(f"{side}_window_size", -1) for side in ("left", "right"))
    causal = bool(case.get("is_causal", 0))
    window = tuple(None if side < 0 else side for side in (left, right))
    lengths = case.inputs.get("nonpad_kv_seqlen")
    if "past_key" in case.inputs:
        offset = np.array(case.inputs["past_key"].shape[2])
    else:
        offset = np.array(0) if lengths is None else lengths[:, None, None, None] - T
    if (offset == S - T).all():  # queries at the end of the keys need no mask
        return {"causal": causal, "window": window}
    ahead = np.arange(S) - (np.arange(T)[:, None] + offset)
    visible = (ahead <= 0) | (not causal)
    visible &= (ahead >= -left) | (left < 0)
    visible &= (ahead <= right) | (right < 0)
    if lengths is not None:
        visible = visible & (np.arange(S) < lengths[:, None, None, None])
    return {"mask": _four(visible)}


def _four(mask: np.ndarray) -> np.ndarray:
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def by_definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """The definition; NumPy's own types only, so bfloat16 goes in as float32."""
    wide = (x.astype(np.float32) if x.dtype.name == "bfloat16" else x for x in (q, k, v))
    bias = options.pop("bias", None)
    bias = None if bias is None else bias.astype(np.float64)
    output = reference.attention(*wide, **options, bias=bias, need_weights=True, need_lse=True)
    return output.out.astype(q.dtype), output.weights.astype(q.dtype), output.lse


def by_kernel(backend: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """`attend` on one of its kernels."""
    arguments = {n: _tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    output = attend(
        _tensor(q), _tensor(k), _tensor(v), **arguments, backend=backend,
        need_weights=True, need_lse=True,
    )  # fmt: skip
    assert output.backend == backend
    return tuple(_array(x, q.dtype) for x in (output.heads, output.weights, output.lse))


def _tensor(x: np.ndarray) -> torch.Tensor:
    if (
        x.dtype.name == "bfloat16"
    ):  # torch cannot read bfloat16 from NumPy; float32 represents it exactly
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(x))


def _array(x: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return wide.numpy().astype(dtype)


ENGINES = {
    "definition": by_definition,
    "fused": partial(by_kernel, "fused"),
    "rows": partial(by_kernel, "rows"),
}


def test_the_cases_are_all_there() -> None:
    assert len(cases()) == 93


@pytest.mark.parametrize("name", ENGINES)
def test_every_case_passes(name: str) -> None:
    # Torch's kernel has no softcap: `attend` refuses it, as its own tests check.
    supported = [case for case in cases() if not (name == "fused" and case.get("softcap", 0.0))]
    assert len(supported) == (82 if name == "fused" else 93)
    failed = {}
    for case in supported:
        outputs = answer(case, ENGINES[name])
        expected = [case.outputs[output] for output in outputs]
        # ONNX allows two units in the last place of bfloat16; of float16 1e-3 is hardly one.
        rtol = 2.0**-9 if case.inputs["Q"].dtype == np.float16 else 1e-3
        try:
            Runner.assert_similar_outputs(expected, list(outputs.values()), rtol=rtol, atol=1e-7)
        except AssertionError as error:
            failed[case.name] = str(error)
    assert not failed, "\n".join(f"{case}: {why}" for case, why in failed.items())
