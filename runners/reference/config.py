"""Shape of the reference build: Gemma 3 270M with DeepSeek's parts put in.

The field names follow DeepSeek's and SGLang's configuration keys (`index_topk`, `n_routed_experts`,
`routed_scaling_factor`, `num_hash_layers`, `hc_mult`), so that a reader of either finds the same words here.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


class ReferenceModelError(ValueError):
    """A model folder, a weight file or an override that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Everything the weights were made for. `config.json` of a model folder holds exactly these keys."""

    vocab_size: int = 262_144
    hidden_size: int = 640
    num_hidden_layers: int = 18
    num_attention_heads: int = 4
    head_dim: int = 256
    """One key head serves all query heads (MQA)."""
    sliding_window: int = 512
    full_attention_layers: tuple[int, ...] = (5, 11, 17)
    """These attend to everything, through the indexer; the others to the last `sliding_window` tokens."""
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    bos_token_id: int = 2
    eos_token_id: int = 1

    index_n_heads: int = 8
    index_head_dim: int = 128
    index_rope_dim: int = 64
    index_topk: int = 512

    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 1024
    """Neurons of one routed expert: a noisy copy of this share of the layer's own FFN."""
    shared_intermediate_size: int = 1024
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    routed_scaling_factor: float = 2.5
    """What the build applies, once."""
    trained_routed_scaling_factor: float = 2.5
    """What the expert weights were divided by; the post-FFN norm's statistic is taken at this factor."""
    expert_noise: float = 0.02
    """Standard deviation of the seeded noise on the experts, relative to each weight matrix's own."""

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    seed: int = 270

    def replaced(self, **changes: object) -> "ReferenceConfig":
        """A copy with some fields changed; ReferenceModelError names a field that does not exist."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ReferenceModelError(f"the reference model has no setting {name!r}; known: {sorted(known)}")
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> "ReferenceConfig":
        """Read `config.json`; ReferenceModelError names the file when it is missing or not this model's."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReferenceModelError(f"{path} is not a readable config.json: {error}") from error
        raw["full_attention_layers"] = tuple(raw.get("full_attention_layers", ()))
        return cls().replaced(**raw)
