"""Manifold-constrained hyper-connections of DeepSeek-V4, in every precision a serving engine has used."""

from longrecall.kernels.mhc.measure import Drift, drift_through_layers
from longrecall.kernels.mhc.mixing import (
    PRECISIONS,
    MhcPre,
    Precision,
    mhc_coefficients,
    mhc_head,
    mhc_mix,
    mhc_post,
    mhc_pre,
    sinkhorn,
)

__all__ = [
    "PRECISIONS",
    "Drift",
    "MhcPre",
    "Precision",
    "drift_through_layers",
    "mhc_coefficients",
    "mhc_head",
    "mhc_mix",
    "mhc_post",
    "mhc_pre",
    "sinkhorn",
]
