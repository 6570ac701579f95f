"""Lower precisions of the hyper-connections, as the suspects they have been; `switch` is `mhc_pre`'s `precision`.

Sinkhorn contracts errors and the gates are Lipschitz, so each is predicted to be rounding: the same at every length,
far below the rounding that bf16 streams bring anyway.
"""

from longrecall.kernels.faults import Fault, Signature

_ROUNDING = Signature(below_onset=True, selection="slight", grows_with_length=False, in_routed_experts=False)

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="mhc-tf32-weights",
        part="mhc",
        title="fn rounded to TF32, fp32 sums: sglang's CUDA default (SGLANG_OPT_DEEPGEMM_HC_PRENORM)",
        sources=("sgl-project/sglang 0.5.23 kernels/ops/layernorm/mhc.py",),
        signature=_ROUNDING,
        switch={"precision": "tf32-weights"},
    ),
    Fault(
        name="mhc-bf16-weights",
        part="mhc",
        title="fn in bf16, fp32 sums and output",
        sources=("sgl-project/sglang 0.5.23 kernels/ops/layernorm/mhc.py",),
        signature=_ROUNDING,
        switch={"precision": "bf16-weights"},
    ),
    Fault(
        name="mhc-bf16-in-out",
        part="mhc",
        title="a bf16 GEMM: x, fn and the mixes all rounded to bf16",
        sources=("sgl-project/sglang 0.5.23 kernels/ops/layernorm/mhc.py",),
        signature=_ROUNDING,
        switch={"precision": "bf16-in-out"},
    ),
    Fault(
        name="mhc-bf16-after-sinkhorn",
        part="mhc",
        title="pre, post and comb cast to bf16 after the Sinkhorn steps, as transformers does",
        sources=("huggingface/transformers 5.19.0 models/deepseek_v4",),
        signature=_ROUNDING,
        switch={"precision": "bf16-after-sinkhorn"},
    ),
)
