"""Other people's index scores and top-k, for `bench`: measured where they are installed, else left out with a reason.

    deep_gemm             fp8 scores: contiguous for many queries over shared keys, paged for few or for keys of each
    sglang topk_v2        top-k through an identity page table (`sglang.kernels.ops.attention.dsv4.topk`)
    sglang deep_select    top-k of fp32 scores (`sglang.kernels.ops.attention.deep_select`, from 0.5.23)
    flashinfer.top_k      top-k of fp32 scores
    torch.topk            always there
    torch.compile         bf16 scores, fused by Inductor from the plain expression

Every maker takes the inputs once and returns a call that does the timed work alone: page tables, plans and schedules
are made beforehand, as a server makes them once for all layers of a step.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 64
"""Keys a page: the only size DeepGEMM's paged scores take on Hopper."""

Select = Callable[["Tensor"], "Tensor"]
"""Scores [T, S] fp32 → indices [T, k]."""


Make = Callable[["Tensor"], Select]
"""Scores of one shape → a selection for that shape."""


class Peers:
    """What is installed, and what of it did not do."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def load(self, module: str, *, distribution: str) -> Any | None:
        try:
            loaded = importlib.import_module(module)
        except Exception as error:  # compiled parts raise whatever their loader meets
            self.fail(module, error)
            return None
        try:
            self.versions[module] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            self.versions[module] = str(getattr(loaded, "__version__", "unknown"))
        return loaded

    def fail(self, name: str, error: Exception) -> None:
        lines = str(error).splitlines() or [""]
        self.left_out[name] = f"{type(error).__name__}: {lines[0]}"[:300]

    def selections(self, k: int) -> dict[str, Make]:
        found: dict[str, Make] = {}
        if module := self.load("sglang.kernels.ops.attention.deep_select", distribution="sglang"):
            found["deep_select"] = partial(_untold, call=partial(_indices, module.topk, k))
        if module := self.load("sglang.kernels.ops.attention.dsv4.topk", distribution="sglang"):
            found["sglang topk_v2"] = partial(_topk_v2, module=module, k=k)
        if module := self.load("flashinfer", distribution="flashinfer-python"):
            found["flashinfer.top_k"] = partial(_untold, call=partial(_indices, module.top_k, k))
        return found | {"torch.topk": torch_topk(k)}


def torch_topk(k: int) -> Make:
    return partial(_untold, call=lambda scores: scores.topk(k, dim=1, sorted=False).indices)


def _indices(function: Callable[["Tensor", int], tuple[Any, "Tensor"]], k: int, scores: "Tensor") -> "Tensor":
    return function(scores, k)[1]


def _untold(_scores: "Tensor", *, call: Select) -> Select:
    """A selection that needs to be told nothing of the shape."""
    return call


def _topk_v2(scores: "Tensor", *, module: Any, k: int) -> Select:
    import torch

    rows, columns = scores.shape
    lengths = torch.full((rows,), columns, device=scores.device, dtype=torch.int32)
    pages = torch.arange(columns // PAGE, device=scores.device, dtype=torch.int32).expand(rows, -1).contiguous()
    plan = module.plan_topk_v2(lengths)
    transform = getattr(module, "topk_transform_paged_v2", None) or module.topk_transform_512_v2

    def call(scores: "Tensor") -> "Tensor":
        out = torch.empty(rows, k, device=scores.device, dtype=torch.int32)
        transform(scores, lengths, pages, out, PAGE, plan)
        return out

    return call


def deep_gemm_scores(
    module: Any, q: "Tensor", keys: "Tensor", scale: "Tensor", weights: "Tensor", visible: "Tensor"
) -> Callable[[], "Tensor"]:
    """q e4m3 [T, H, D], keys e4m3 [S, D] or [T, S, D] with fp32 scale → a call that scores all keys, [T, S] fp32."""
    rows = q.shape[0]
    if rows > 64 and keys.ndim == 2:
        start = visible.new_zeros(rows)
        store = (keys, scale)
        return lambda: module.fp8_mqa_logits(q, store, weights, start, visible, clean_logits=False)
    columns = keys.shape[-2]
    cache = paged_cache(keys, scale)
    import torch

    blocks = torch.arange(cache.shape[0], device=q.device, dtype=torch.int32)
    table = blocks.view(-1, columns // PAGE) if keys.ndim == 3 else blocks.expand(rows, -1)
    table, lengths = table.contiguous(), visible.view(rows, 1).contiguous()
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    schedule = module.get_paged_mqa_logits_metadata(lengths, PAGE, count)
    query = q.unsqueeze(1)
    return lambda: module.fp8_paged_mqa_logits(query, cache, weights, lengths, table, schedule, columns)


def paged_cache(keys: "Tensor", scale: "Tensor") -> "Tensor":
    """Keys e4m3 [..., S, D] and fp32 scales → uint8 [pages, 64, 1, D + 4]: a page's keys first, then its scales."""
    import torch

    dim = keys.shape[-1]
    pages = keys.numel() // dim // PAGE
    out = torch.empty(pages, PAGE * (dim + 4), device=keys.device, dtype=torch.uint8)
    out[:, : PAGE * dim] = keys.view(torch.uint8).reshape(pages, PAGE * dim)
    out[:, PAGE * dim :] = scale.contiguous().view(torch.uint8).reshape(pages, PAGE * 4)
    return out.view(pages, PAGE, 1, dim + 4)


def compiled_scores(q: "Tensor", keys: "Tensor", weights: "Tensor", *, block: int) -> Callable[[], "Tensor"]:
    """bf16 q [T, H, D], keys [S, D] → a call that scores all keys in blocks of queries, through torch.compile."""
    import torch

    @torch.compile
    def score(q: "Tensor", keys: "Tensor", weights: "Tensor") -> "Tensor":
        dots = (q.flatten(0, 1) @ keys.T).view(q.shape[0], q.shape[1], -1)
        return (dots.float().relu() * weights.unsqueeze(2)).sum(1)

    def call() -> "Tensor":
        starts = range(0, q.shape[0], block)
        return torch.cat([score(q[i : i + block], keys, weights[i : i + block]) for i in starts])

    return call
