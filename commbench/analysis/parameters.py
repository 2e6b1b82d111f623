"""A model's parameters, from its Hugging Face ``config.json``: what a weight update moves.

Names and shapes are those of the checkpoints of each architecture (transformers' modelling code). Tests hold the totals
against the published numbers of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from commbench.errors import UsageError
from commbench.types import DTYPES

# architecture → what it has beside Llama's layers
_KINDS: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset(),
    "MistralForCausalLM": frozenset(),
    "Qwen2ForCausalLM": frozenset({"qkv bias"}),
    "Qwen3ForCausalLM": frozenset({"qk norm"}),
    "MixtralForCausalLM": frozenset({"mixtral experts"}),
    "Qwen3MoeForCausalLM": frozenset({"qk norm", "qwen experts"}),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a model by its name in the checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Parameters:
    """All of a model's, in the order of its modules, of one dtype."""

    architecture: str
    dtype: str
    tensors: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.tensors)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


def parameters_of(
    config: Mapping[str, Any], where: str = "config.json", *, dtype: str = "", layers: int | None = None
) -> Parameters:
    """The parameters of the model that a ``config.json`` describes.

    dtype: in place of the config's. layers: the first so many only. Raises UsageError for an architecture whose
    parameters are not known here, a number that is missing, an unknown dtype, and more layers than there are.
    """
    names = config.get("architectures") or []
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise UsageError(
            f"{where}: the parameters of {architecture or 'no architecture'!r} are not known; known: {known}"
        )
    dtype = dtype or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in DTYPES:
        raise UsageError(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    have = _number(config, where, "num_hidden_layers")
    if layers is not None and not 0 <= layers <= have:
        raise UsageError(f"{where}: {layers} layers of a model that has {have}")
    tensors = tuple(_tensors(config, where, _KINDS[architecture], have if layers is None else layers))
    return Parameters(architecture, dtype, tensors)


def _number(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: {key} is {value!r}; it must be a whole number, at least 1")
    return value


def _tensors(config: Mapping[str, Any], where: str, kind: frozenset[str], layers: int) -> Iterator[Parameter]:
    hidden, vocabulary = _number(config, where, "hidden_size"), _number(config, where, "vocab_size")
    yield Parameter("model.embed_tokens.weight", (vocabulary, hidden))
    for i in range(layers):
        prefix = f"model.layers.{i}"
        yield from _attention(config, where, kind, hidden, f"{prefix}.self_attn")
        if kind & {"mixtral experts", "qwen experts"}:
            yield from _experts(config, where, kind, i, hidden, prefix)
        else:
            yield from _mlp(hidden, _number(config, where, "intermediate_size"), f"{prefix}.mlp")
        yield Parameter(f"{prefix}.input_layernorm.weight", (hidden,))
        yield Parameter(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield Parameter("model.norm.weight", (hidden,))
    if not config.get("tie_word_embeddings", False):
        yield Parameter("lm_head.weight", (vocabulary, hidden))


def _attention(
    config: Mapping[str, Any], where: str, kind: frozenset[str], hidden: int, prefix: str
) -> Iterator[Parameter]:
    heads = _number(config, where, "num_attention_heads")
    kv_heads = _number(config, where, "num_key_value_heads", heads)
    size = _number(config, where, "head_dim", hidden // heads)
    bias = bool(config.get("attention_bias", False))
    for name, rows in (("q", heads * size), ("k", kv_heads * size), ("v", kv_heads * size)):
        yield Parameter(f"{prefix}.{name}_proj.weight", (rows, hidden))
        if bias or "qkv bias" in kind:
            yield Parameter(f"{prefix}.{name}_proj.bias", (rows,))
    yield Parameter(f"{prefix}.o_proj.weight", (hidden, heads * size))
    if bias:
        yield Parameter(f"{prefix}.o_proj.bias", (hidden,))
    if "qk norm" in kind:
        yield Parameter(f"{prefix}.q_norm.weight", (size,))
        yield Parameter(f"{prefix}.k_norm.weight", (size,))


def _mlp(hidden: int, inner: int, prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> (
    Iterator[Parameter]
):  # fmt: skip
    gate, up, down = names
    yield Parameter(f"{prefix}.{gate}.weight", (inner, hidden))
    yield Parameter(f"{prefix}.{up}.weight", (inner, hidden))
    yield Parameter(f"{prefix}.{down}.weight", (hidden, inner))


def _experts(
    config: Mapping[str, Any], where: str, kind: frozenset[str], layer: int, hidden: int, prefix: str
) -> Iterator[Parameter]:
    if "mixtral experts" in kind:
        count, inner = _number(config, where, "num_local_experts"), _number(config, where, "intermediate_size")
        yield Parameter(f"{prefix}.block_sparse_moe.gate.weight", (count, hidden))
        for i in range(count):
            yield from _mlp(hidden, inner, f"{prefix}.block_sparse_moe.experts.{i}", ("w1", "w3", "w2"))
        return
    step = _number(config, where, "decoder_sparse_step", 1)
    if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step:
        yield from _mlp(hidden, _number(config, where, "intermediate_size"), f"{prefix}.mlp")
        return
    count, inner = _number(config, where, "num_experts"), _number(config, where, "moe_intermediate_size")
    yield Parameter(f"{prefix}.mlp.gate.weight", (count, hidden))
    for i in range(count):
        yield from _mlp(hidden, inner, f"{prefix}.mlp.experts.{i}")
