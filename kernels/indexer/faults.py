"""Faults of the index keys and of the selection; `switch` holds fields of `emulate.Pipeline`."""

from longrecall.kernels.faults import Fault, Residue, Signature

FAULTS = (
    Fault(
        name="hadamard-query-only",
        part="indexer",
        title="The query is Hadamard-rotated, the key is not",
        sources=("ROCm/ATOM#1507", "vllm-project/vllm#55459", "NVIDIA/TensorRT-LLM#13061"),
        switch={"rotate": "q"},
        signature=Signature(below_onset=False, selection="chance", grows_with_length=True, in_indexer_topk=True),
    ),
    Fault(
        name="hadamard-key-only",
        part="indexer",
        title="The key is Hadamard-rotated, the query is not",
        sources=("ROCm/ATOM#1507", "vllm-project/vllm#55459"),
        switch={"rotate": "k"},
        signature=Signature(below_onset=False, selection="chance", grows_with_length=True, in_indexer_topk=True),
    ),
    Fault(
        name="fnuz-misread",
        part="indexer",
        title="e4m3fn key bytes are read as e4m3fnuz: values halve and byte 0x80 (-0) becomes NaN, dropping its key",
        sources=("vllm-project/vllm#52109",),
        switch={"key_format": "fp8_fnuz"},
        # Halving every key changes no order; only the keys that hold a 0x80 byte are lost, at any length.
        signature=Signature(below_onset=False, selection="slight", grows_with_length=False, in_indexer_topk=True),
    ),
    Fault(
        name="scale-shared-by-layers",
        part="indexer",
        title="Every layer dequantises its keys with one layer's scales",
        sources=("ROCm/ATOM#1466",),
        switch={"key_scale": "first-layer"},
        signature=Signature(
            below_onset=False, selection="partial", grows_with_length=True, layers="all but one", in_indexer_topk=True
        ),
    ),
    Fault(
        name="scale-dropped",
        part="indexer",
        title="The key scale is never multiplied back: every key has the same largest value",
        sources=("ROCm/ATOM#1466", "vllm-project/vllm#50576"),
        switch={"key_scale": "dropped"},
        signature=Signature(below_onset=False, selection="partial", grows_with_length=True, in_indexer_topk=True),
    ),
    Fault(
        name="stale-page",
        part="indexer",
        title="One page of index keys still holds another request's keys",
        sources=("ROCm/ATOM#1417", "sgl-project/sglang#30339"),
        switch={"stale_page": -1},
        signature=Signature(below_onset=False, selection="slight", grows_with_length=False, in_indexer_topk=True),
    ),
    Fault(
        name="rope-layout",
        part="indexer",
        title="Interleaved rope where the indexer was trained on half-split (or the reverse), on both sides",
        sources=("sgl-project/sglang#13495", "vllm-project/vllm#28968", "vllm-project/vllm-ascend#4641"),
        switch={"rope": "swapped"},
        signature=Signature(below_onset=False, selection="partial", grows_with_length=True, in_indexer_topk=True),
    ),
    Fault(
        name="topk-overflow",
        part="indexer",
        title="The candidate buffer of the threshold bin overflows: late arrivals are dropped",
        sources=("sgl-project/sglang#36807", "sgl-project/sglang#35257", "vllm-project/vllm#51782"),
        switch={"topk_mode": "truncating", "topk_buffer": 2048},
        # Needs a crowded bin: scores close together relative to their size. Where there is none, nothing is lost.
        signature=Signature(
            below_onset=False, selection="partial", grows_with_length=True, repeatable=False, in_indexer_topk=True
        ),
    ),
    Fault(
        name="k-hard-coded",
        part="indexer",
        title="A kernel compiled for one k serves a model with another: only a part of the picks are kept",
        sources=("ROCm/ATOM#1591",),
        switch={"kept_fraction": 0.5},
        signature=Signature(below_onset=True, selection="partial", grows_with_length=False, in_indexer_topk=True),
    ),
    Fault(
        name="compressor-tail",
        part="indexer",
        title="The compressor's state keeps one leftover token too few: the entry across the prefill seam is wrong",
        sources=("vllm-project/vllm#55927", "GDzhu01/vllm-ascend-deepseekv4#76"),
        switch={"compressor_tail": 2},
        signature=Signature(
            below_onset=True,
            selection="slight",
            grows_with_length=False,
            phases=("decode",),
            residue=Residue(modulus=4, values=(3,)),
            in_indexer_topk=True,
        ),
    ),
    Fault(
        name="mask-zero",
        part="indexer",
        title="Slots past the end score 0 instead of -inf: they displace keys whose score is negative",
        sources=("sgl-project/sglang#28471",),
        switch={"mask_value": 0.0},
        # Far beyond the onset the k-th score is positive and zeros displace nothing: the loss is near and below it.
        signature=Signature(below_onset=True, selection="untouched", grows_with_length=False, in_indexer_topk=True),
    ),
)
