"""The DSA indexer of the full-attention layers: which `index_topk` tokens a query attends to.

    q = rope(W_q h) [T, H, D];  k = rope(LayerNorm(W_k h)) [T, D];  w = (W_w h + b) (H D)^-1/2 [T, H]
    both rotated by the Hadamard matrix, both in KEY_FORMAT;  score[t, j] = sum_h w[t, h] relu(q[t, h] . k[j])

The shape is DeepSeek-V3.2's (LayerNorm with bias on the key, half-split rope on the first `index_rope_dim`
dimensions); the weights come from `train_indexer.py`. Keys are cached as values of KEY_FORMAT in the model's dtype.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longrecall.kernels.indexer import fake_quantize, hadamard, index_topk
from longrecall.runners.reference.config import ReferenceConfig, ReferenceModelError

KEY_FORMAT = "bf16"
"""Format of the cached index keys and of the index queries."""

WEIGHTS_FILE = Path(__file__).with_name("indexer.safetensors")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rope on the last dimension of fp32 x [T, N, D]; cos and sin [T, D/2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Indexer:
    """One layer's indexer."""

    def __init__(self, config: ReferenceConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_dim, self.topk = config.index_rope_dim, config.index_topk
        self.wq = weights["wq.weight"].to(dtype)
        self.wk = weights["wk.weight"].to(dtype)
        self.k_norm_weight = weights["k_norm.weight"].float()
        self.k_norm_bias = weights["k_norm.bias"].float()
        self.weights_proj = weights["weights_proj.weight"].float()
        self.weights_bias = weights["weights_proj.bias"].float()
        self.weight_scale = (self.n_heads * self.head_dim) ** -0.5

    def _rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((apply_rope(x[..., : self.rope_dim], cos, sin), x[..., self.rope_dim :]), -1)

    def keys(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Index keys [T, D] of the normed layer input h [T, C], as they are cached."""
        k = F.linear(h, self.wk).float()
        k = F.layer_norm(k, (self.head_dim,), self.k_norm_weight, self.k_norm_bias, 1e-6)
        k = self._rope(k[:, None], cos, sin)[:, 0]
        k = hadamard(k)
        return fake_quantize(k, KEY_FORMAT)

    def queries(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [T, H, D] and head weights [T, H] of h [T, C]."""
        q = F.linear(h, self.wq).float().view(-1, self.n_heads, self.head_dim)
        q = self._rope(q, cos, sin)
        q = hadamard(q)
        weights = F.linear(h.float(), self.weights_proj, self.weights_bias) * self.weight_scale
        return fake_quantize(q, KEY_FORMAT), weights

    def select(self, q: Tensor, keys: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        """int32 [T, index_topk]: the tokens each query attends to, -1 padded; query t sees keys j < visible[t]."""
        return index_topk(q, keys, weights, self.topk, visible=visible)


def load_indexers(
    config: ReferenceConfig, *, device: torch.device, dtype: torch.dtype, path: Path = WEIGHTS_FILE
) -> dict[int, Indexer]:
    """layer → Indexer from the shipped weights; ReferenceModelError names a missing, torn or ill-fitting file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise ReferenceModelError(f"{path} is not a readable indexer weight file: {error}") from error
    made = {}
    for layer in config.full_attention_layers:
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        expected = (config.index_n_heads * config.index_head_dim, config.hidden_size)
        if "wq.weight" not in own or tuple(own["wq.weight"].shape) != expected:
            raise ReferenceModelError(f"{path} has no indexer of shape {list(expected)} for layer {layer}")
        made[layer] = Indexer(config, own, dtype)
    return made
