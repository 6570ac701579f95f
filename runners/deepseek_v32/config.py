"""Sizes of the model: what SGLang's sparse-attention kernels fix, and what is free and kept small.

Fixed: index_topk 2048, index heads of 128 (32 or 64 of them), latent 512, rope 64, nope 128, value 128, heads a divisor
of 64. Field names are HuggingFace's for `deepseek_v32`, so that `hf_config` only adds what is constant.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class V32Config:
    vocab_size: int
    hidden_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    intermediate_size: int = 1024
    """Of the leading dense layers."""
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_factor: float = 16.0
    rope_original: int = 4096
    """YaRN, as in the released model: dimensions that turn slowly within `rope_original` turn `rope_factor` slower."""

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """YaRN's mscale, squared, times head_dim^-1/2."""
        mscale = 0.1 * math.log(self.rope_factor) + 1.0 if self.rope_factor > 1 else 1.0
        return self.head_dim**-0.5 * mscale * mscale

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        own = asdict(self)
        rope = {"factor": own.pop("rope_factor"), "original_max_position_embeddings": own.pop("rope_original")}
        return {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **own,
            "num_key_value_heads": self.num_attention_heads, "hidden_act": "silu", "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1, "ep_size": 1,
            "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
            "max_position_embeddings": int(self.rope_original * self.rope_factor), "num_nextn_predict_layers": 0,
            "rope_scaling": {
                "type": "yarn", **rope, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
