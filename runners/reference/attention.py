"""Attention over packed sequences: which rows of which caches a batch of query rows reads, planned once per forward.

Sequences that branch off one history (the same block, the same length) are attended in one call: their queries stand
together, the history's keys are read once, and a mask keeps each branch to its own tail.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from longrecall.runners.reference.cache import Block, SequenceCache

WINDOW_ROWS = 128
"""Query rows of one call of a windowed layer: it touches 640 keys of which each row uses 512."""

FULL_ROWS = 256
"""Query rows of one call of a full-attention layer: a causal block wastes half of its own square, no more."""

JOINT_ROWS = 640
"""Most query rows of several branches attended together; each also masks the others' tails away."""


@dataclass(frozen=True)
class Member:
    """One sequence's new tokens in a packed batch."""

    cache: SequenceCache
    row: int
    """Place of its first new token in the packed batch."""
    tokens: int
    start: int
    """Tokens it held before."""


@dataclass
class Job:
    """Query rows [row, row + rows) against one list of key rows."""

    row: int
    rows: int
    members: list[Member]
    positions: Tensor
    """int64 [rows]."""
    base: Block | None
    base_start: int
    base_end: int
    tails: list[tuple[Member, int, int]]
    """Rows [start, end) of each member's own block."""
    mask: Tensor
    """fp32 [rows, keys], 0 or -inf."""
    wide_mask: Tensor
    """The same for [rows * heads, keys]."""
    tail_columns: list[int] = field(default_factory=list)
    """Where each of `tails` begins among the keys."""

    def gather(self, name: str, layer: int) -> Tensor:
        """Keys or values [keys, D] of one layer."""
        parts = []
        if self.base is not None and self.base_end > self.base_start:
            parts.append(getattr(self.base, name)[layer, self.base_start : self.base_end])
        for member, start, end in self.tails:
            if end > start:
                parts.append(getattr(member.cache.tail, name)[layer, start:end])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def group_members(members: list[Member]) -> list[list[Member]]:
    """Branches of one history together (neighbours in the batch only), every other sequence alone."""
    groups: list[list[Member]] = []
    for member in members:
        last = groups[-1] if groups else []
        joint = (
            last
            and member.cache.base is not None
            and last[0].cache.base is member.cache.base
            and last[0].cache.base_length == member.cache.base_length
            and max(m.cache.tail_length + m.tokens for m in (last[0], member)) <= FULL_ROWS
            and sum(m.tokens for m in last) + member.tokens <= JOINT_ROWS
        )
        if joint:
            last.append(member)
        else:
            groups.append([member])
    return groups


def _mask(q_positions: Tensor, q_owner: Tensor, k_positions: Tensor, k_owner: Tensor, window: int | None) -> Tensor:
    distance = q_positions[:, None] - k_positions[None]
    seen = (distance >= 0) & ((k_owner[None] == -1) | (k_owner[None] == q_owner[:, None]))
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


def plan_jobs(groups: list[list[Member]], window: int | None, heads: int, device: torch.device) -> list[Job]:
    """The calls that attend every row; `window` None: to everything before it. Call before the caches are extended."""
    jobs = []
    for group in groups:
        blocks = [group] if len(group) > 1 else _split(group[0], FULL_ROWS if window is None else WINDOW_ROWS)
        for members in blocks:
            jobs.append(_job(members, window, heads, device))
    return jobs


def _split(member: Member, size: int) -> list[list[Member]]:
    return [
        [Member(member.cache, member.row + at, min(size, member.tokens - at), member.start + at)]
        for at in range(0, member.tokens, size)
    ]


def _job(members: list[Member], window: int | None, heads: int, device: torch.device) -> Job:
    first = members[0]
    reach = 0 if window is None else max(0, min(m.start for m in members) - window + 1)
    base_length = first.cache.base_length
    base_start = min(reach, base_length)
    k_positions, k_owner = [torch.arange(base_start, base_length)], [torch.full((base_length - base_start,), -1)]
    q_positions, q_owner, tails, tail_columns = [], [], [], []
    column = base_length - base_start
    for number, member in enumerate(members):
        end = member.start + member.tokens - base_length
        start = max(0, reach - base_length)
        tails.append((member, start, end))
        tail_columns.append(column)
        column += end - start
        k_positions.append(torch.arange(base_length + start, base_length + end))
        k_owner.append(torch.full((end - start,), number))
        q_positions.append(torch.arange(member.start, member.start + member.tokens))
        q_owner.append(torch.full((member.tokens,), number))
    positions = torch.cat(q_positions)
    mask = _mask(positions, torch.cat(q_owner), torch.cat(k_positions), torch.cat(k_owner), window).to(device)
    return Job(
        row=first.row,
        rows=sum(m.tokens for m in members),
        members=members,
        positions=positions,
        base=first.cache.base,
        base_start=base_start,
        base_end=base_length,
        tails=tails,
        mask=mask,
        wide_mask=mask.repeat_interleave(heads, 0),
        tail_columns=tail_columns,
    )


def columns_of(job: Job, member_number: int, selected: Tensor) -> Tensor:
    """Positions in the sequence [rows, K] (-1 padded) → places among the keys of a job without a window."""
    moved = selected + (job.tail_columns[member_number] - job.base_end)
    return torch.where(selected < job.base_end, selected, moved)


def selection_mask(job: Job, selected: Tensor) -> Tensor:
    """fp32 [rows, keys] that admits exactly the selected positions [rows, K] of each row."""
    keys = job.mask.shape[1]
    mask = torch.full((job.rows, keys + 1), float("-inf"), device=selected.device)
    row = 0
    for number, member in enumerate(job.members):
        own = selected[row : row + member.tokens].long()
        columns = columns_of(job, number, own).masked_fill_(own < 0, keys)
        mask[row : row + member.tokens].scatter_(1, columns, 0.0)
        row += member.tokens
    return mask[:, :keys]


def attend(q: Tensor, k: Tensor, v: Tensor, wide_mask: Tensor, scale: float) -> Tensor:
    """q [rows, H, D], k and v [keys, D] shared by all heads, fp32 mask [rows * H, keys] → [rows, H, D]."""
    # all heads as one long list of queries: the one key head is then packed once, not once per head
    mask = wide_mask.to(q.dtype) if q.is_cuda else wide_mask
    out = F.scaled_dot_product_attention(
        q.reshape(1, 1, -1, q.shape[-1]), k[None, None], v[None, None], attn_mask=mask[None, None], scale=scale
    )
    return out.view(q.shape)
