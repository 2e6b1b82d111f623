"""Parameters of models, held against the totals that their publishers give."""

from __future__ import annotations

from typing import Any

import pytest

from commbench.analysis.parameters import Parameter, parameters_of
from commbench.errors import UsageError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-3.2-1B": (
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "num_hidden_layers": 16,
         "tie_word_embeddings": True}, 1_235_814_400,
    ),
    "Mistral-7B-v0.1": ({**LLAMA, "architectures": ["MistralForCausalLM"], "vocab_size": 32000}, 7_241_732_096),
    "Qwen2.5-7B": (
        {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
         "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 12288, "head_dim": 128,
         "num_hidden_layers": 36, "vocab_size": 151936}, 8_190_735_360,
    ),
    "Mixtral-8x7B-v0.1": (
        {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "vocab_size": 32000}, 46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "head_dim": 128, "num_experts": 128, "num_hidden_layers": 48,
         "num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936},
        30_532_122_624,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_total_is_the_published_one(name: str) -> None:
    config, total = MODELS[name]
    found = parameters_of(config)
    assert found.numel == total
    assert found.size_bytes == 2 * total
    assert len({p.name for p in found.tensors}) == len(found.tensors)


def test_layers_and_dtype_can_be_chosen() -> None:
    found = parameters_of(LLAMA, layers=1, dtype="float32")
    assert found.tensors[:2] == (
        Parameter("model.embed_tokens.weight", (128256, 4096)),
        Parameter("model.layers.0.self_attn.q_proj.weight", (4096, 4096)),
    )
    assert len(found.tensors) == 1 + 9 + 2
    assert found.size_bytes == 4 * found.numel


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "the parameters of 'MambaForCausalLM' are not known; known: Llama"),
        ({"architectures": []}, "'no architecture' are not known"),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is not one of float32"),
    ],
)
def test_what_is_not_known_or_missing_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parameters_of({**LLAMA, **change})


def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="33 layers of a model that has 32"):
        parameters_of(LLAMA, layers=33)
