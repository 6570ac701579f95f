"""Known faults as source edits of the reference build, with the cause each one has: what attribution is tested on.

Each is a real diff against this checkout's kernels/ and runners/reference/, served like any patch under suspicion. They
follow the catalogue of public bugs (kernels/*/faults.py), scaled where the model is too small to show them. `harmless`
ones were seen to cost nothing on this model: they must not be convicted, and nobody can attribute a loss they do not
cause. An edit names text that stands in the file exactly `times` times, so that a change of the source is noticed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class FaultEditError(ValueError):
    """An edit whose text is no longer in the source as often as it says."""


class Edit(NamedTuple):
    """All `times` places of `old` in a file become `new`."""

    path: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class ReferenceFault:
    """One fault, what it breaks, and whether it costs recall here."""

    name: str
    family: str
    """The right answer of an attribution: a family of evals/causes.py."""
    title: str
    edits: tuple[Edit, ...]
    harmless: bool = False


_INDEXER = "runners/reference/indexer.py"
_MOE = "runners/reference/moe.py"
_MODEL = "runners/reference/model.py"
_ENGINE = "runners/reference/engine.py"
_PREFIX = "runners/reference/prefix_cache.py"
_MIXING = "kernels/mhc/mixing.py"
_DECODE = "kernels/sparse_attention/decode.py"


def _fault(name: str, family: str, title: str, *edits: Edit, harmless: bool = False) -> ReferenceFault:
    return ReferenceFault(name=name, family=family, title=title, edits=edits, harmless=harmless)


_KEYS_OUT = "        return fake_quantize(k, KEY_FORMAT)\n"
_QUERIES_OUT = "        return fake_quantize(q, KEY_FORMAT), weights\n"
_SELECT = "        return index_topk(q, keys, weights, self.topk, visible=visible)\n"
_APPLIED = "apply_routed_scaling_factor_on_output=False"
_GIVEN = f",\n                routed_scaling_factor=config.routed_scaling_factor,\n                {_APPLIED}"
_HASH_FALSE = f'weights["topk.tid2eid"]{_GIVEN}'
_OTHER_FALSE = f"config.scoring_func{_GIVEN}"
_FACTOR = "        self.routed_scaling_factor = config.routed_scaling_factor\n        self.gate_weight"
_HASH_LAYER = "layer_id < config.num_hash_layers"
_QUERIES = "        q = F.linear(h, self.wq).float().view(-1, self.n_heads, self.head_dim)\n"
_KEYS_TURNED = "        k = self._rope(k[:, None], cos, sin)[:, 0]\n"
_LONG = "        if len(keys) > 512:\n            keys = keys.clone()\n"
_FORK = "            sequence.cache = match.cache.fork(match.length) if match else self.model.new_cache()\n"
_BLOCK = "                block = sequence.cache.base or sequence.cache.tail\n"
_ROUND = "    post, comb = (x.to(torch.float8_e5m2).float() for x in (post, comb))\n"
_QK = "        q, k = qk[:, :heads], qk[:, heads]\n"
_OUT = "            yield routed.add_(shared).mul_(scale).mul_(self.norm_weight)\n"
_COEFFICIENTS = "    comb = sinkhorn(logits[:, n:].reshape(-1, n, n), sinkhorn_steps, eps)\n"
_ATTEND = "        partial = attend_splits(q, k, v, indices, scale=scale, split_size=split_size)\n"
_MERGE = "    merged = merge_splits(partial.out, partial.lse, sink)\n"
_ENTRY = "        return Match(length, entry.cache)\n"
_HELD = "        held = np.asarray([*sequence.request.token_ids, *sequence.request.output_ids], dtype=np.int32)\n"
_HELD_CUT = "        held = np.asarray([*sequence.tokens, *sequence.request.output_ids], dtype=np.int32)\n"
_TOKENS = "        self.tokens: Tokens = np.asarray(request.token_ids, dtype=np.int32)\n"


def _wrong(text: str) -> str:
    return text.replace("False", "True")


FAULTS: tuple[ReferenceFault, ...] = (
    # index keys: act beyond the onset of the selection only
    _fault(
        "hadamard-query-only", "index keys", "Hadamard rotation on the index queries and no longer on the keys",
        Edit(_INDEXER, "        k = hadamard(k)\n", ""),
    ),
    _fault(
        "head-weights-sign", "index keys", "The sign of the index heads' weights is lost",
        Edit(_INDEXER, _QUERIES_OUT, "        return fake_quantize(q, KEY_FORMAT), -weights\n"),
    ),
    _fault(
        "query-heads-permuted", "index keys", "Index queries are laid out head-last and read head-first",
        Edit(
            _INDEXER, _QUERIES,
            _QUERIES.replace(
                "self.n_heads, self.head_dim)", "self.head_dim, self.n_heads).transpose(1, 2).contiguous()"
            ),
        ),
    ),
    _fault(
        "stale-pages", "index keys", "Index pages of long sequences still hold another request's keys",
        Edit(
            _INDEXER, _SELECT,
            _LONG + "            keys[:320] = keys[320:640].mean(0)\n" + _SELECT,
        ),
    ),
    _fault(
        "candidates-truncated", "index keys", "The candidate buffer keeps the latest 512 keys only",
        Edit(
            _INDEXER, _SELECT,
            _LONG + "            keys[:-512] = float(\"nan\")\n" + _SELECT,
        ),
    ),
    _fault(
        "topk-smallest", "index keys", "The threshold search is inverted: the lowest scores are kept",
        Edit(_INDEXER, _SELECT, "        return index_topk(q, keys, -weights, self.topk, visible=visible)\n"),
    ),
    _fault(
        "hadamard-key-only", "index keys", "Hadamard rotation on the index keys and no longer on the queries",
        Edit(_INDEXER, "        q = hadamard(q)\n", ""),
    ),
    _fault(
        "rope-layout", "index keys", "Index keys are turned in pairs of neighbours, queries half against half",
        Edit(
            _INDEXER, _KEYS_TURNED,
            "        pairs = k[:, : self.rope_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)\n"
            "        k = torch.cat((pairs, k[:, self.rope_dim :]), -1)\n" + _KEYS_TURNED,
        ),
    ),
    _fault(
        "index-off-by-one", "index keys", "Selected positions of long sequences point at the entry before",
        Edit(
            _INDEXER, _SELECT,
            "        found = index_topk(q, keys, weights, self.topk, visible=visible)\n"
            "        return torch.where((found > 0) & (len(keys) > 512), found - 1, found)\n",
        ),
    ),
    _fault(
        "fnuz-misread", "index keys", "e4m3fn bytes of the index keys read as e4m3fnuz",
        Edit(_INDEXER, _KEYS_OUT, "        return torch.nan_to_num(fake_quantize(k, \"fp8_fnuz\"))\n"), harmless=True,
    ),
    # routed scaling: acts at every length, and not at all when the factor is 1
    _fault(
        "scaling-twice", "routed scaling", "The factor in the top-k and again in the reduce, every layer",
        Edit(_MOE, _APPLIED, _wrong(_APPLIED), 2),
    ),
    _fault(
        "scaling-twice-hash", "routed scaling", "The factor twice in the hash-routed layers",
        Edit(_MOE, _HASH_FALSE, _wrong(_HASH_FALSE)),
    ),
    _fault(
        "scaling-twice-other", "routed scaling", "The factor twice in the layers behind the hash-routed ones",
        Edit(_MOE, _OTHER_FALSE, _wrong(_OTHER_FALSE)),
    ),
    _fault(
        "scaling-missing", "routed scaling", "Nobody applies the factor",
        Edit(_MOE, "topk_weights[rows], self.routed_scaling_factor)", "topk_weights[rows], 1.0)"),
    ),
    _fault(
        "scaling-missing-hash", "routed scaling", "Nobody applies the factor in the hash-routed layers",
        Edit(_MOE, _FACTOR, _FACTOR.replace("= config", f"= 1.0 if {_HASH_LAYER} else config")),
    ),
    _fault(
        "scaling-missing-other", "routed scaling", "Nobody applies the factor behind the hash-routed layers",
        Edit(_MOE, _FACTOR, _FACTOR.replace("factor\n", f"factor if {_HASH_LAYER} else 1.0\n")),
    ),
    _fault(
        "scaling-inverted-hash", "routed scaling", "The hash-routed layers divide by the factor",
        Edit(
            _MOE, _FACTOR,
            _FACTOR.replace("= config", f"= 1 / config.routed_scaling_factor if {_HASH_LAYER} else config"),
        ),
    ),
    _fault(
        "shared-scaled", "routed scaling", "The shared expert is multiplied by the factor as well",
        Edit(_MOE, _OUT, _OUT.replace("(shared)", "(shared * self.routed_scaling_factor)")),
    ),
    _fault(
        "shared-divided", "routed scaling", "The fused shared slot weighs 1/factor",
        Edit(_MOE, _OUT, _OUT.replace("(shared)", "(shared / self.routed_scaling_factor)")),
    ),
    # hyper-connections: act at every length, and under no intervention less
    _fault(
        "mhc-fp4", "MHC", "Mixing coefficients rounded to a mantissa of two bits after the Sinkhorn steps",
        Edit(_MIXING, _COEFFICIENTS, _COEFFICIENTS + _ROUND),
    ),
    _fault(
        "mhc-sinkhorn-skipped", "MHC", "The mixing matrix is used before the Sinkhorn steps",
        Edit(_MIXING, _COEFFICIENTS, "    comb = logits[:, n:].reshape(-1, n, n).softmax(-1)\n"),
    ),
    _fault(
        "mhc-post-halved", "MHC", "post = sigmoid(…) without its factor 2",
        Edit(_MIXING, "    post = logits[:, :n].sigmoid() * 2\n", "    post = logits[:, :n].sigmoid()\n"),
    ),
    _fault(
        "mhc-post-doubled", "MHC", "post = 4 sigmoid(…): its factor 2 in the weights and in the kernel",
        Edit(_MIXING, "    post = logits[:, :n].sigmoid() * 2\n", "    post = logits[:, :n].sigmoid() * 4\n"),
    ),
    _fault(
        "mhc-bf16", "MHC", "Mixing coefficients cast to bf16 after the Sinkhorn steps",
        Edit(_MODEL, 'MHC_PRECISION: Precision = "fp32"', 'MHC_PRECISION: Precision = "bf16-after-sinkhorn"'),
        harmless=True,
    ),
    # sparse decode: generated tokens only
    _fault(
        "decode-unscaled", "decode kernel", "Decode attends without the softmax scale",
        Edit(_DECODE, _ATTEND, _ATTEND.replace("scale=scale", "scale=1.0")),
    ),
    _fault(
        "decode-values-shifted", "decode kernel", "Decode gathers each value from the slot behind its key",
        Edit(_DECODE, _ATTEND, _ATTEND.replace("k, v,", "k, v.roll(-1, -2),")),
    ),
    _fault(
        "decode-first-entries", "decode kernel", "Stale scheduler metadata: decode reads the first 64 selected entries",
        Edit(_DECODE, _ATTEND, "        indices = indices.clone()\n        indices[:, 64:] = -1\n" + _ATTEND),
    ),
    _fault(
        "decode-padding-read", "decode kernel", "Padding of the index list is read as entry 0",
        Edit(_DECODE, _ATTEND, _ATTEND.replace("indices,", "indices.clamp_min(0),")),
    ),
    _fault(
        "decode-split-dropped", "decode kernel", "The last split of the index list is never merged",
        Edit(_DECODE, _MERGE, _MERGE.replace("partial.out, partial.lse", "partial.out[:-1], partial.lse[:-1]")),
    ),
    _fault(
        "decode-heads-swapped", "decode kernel", "Decode answers each query head with another's output",
        Edit(_DECODE, _ATTEND, _ATTEND.replace("(q,", "(q.flip(1),")),
    ),
    _fault(
        "decode-lse-base2", "decode kernel", "Splits are merged with base-2 lse read as natural logarithms",
        Edit(_DECODE, "    lse_s = lses.float()", "    lse_s = (lses.float() / 0.6931472)"), harmless=True,
    ),
    # prefix cache: only when something is reused
    _fault(
        "cache-page-rounded-up", "cache/transfer", "A prefix is matched by pages of 64: the last is another request's",
        Edit(
            _PREFIX, _ENTRY,
            "        length = min(-(-length // 64) * 64, len(tokens), entry.cache.length)\n" + _ENTRY,
        ),
    ),
    _fault(
        "cache-first-page-hash", "cache/transfer", "A prefix is looked up by the hash of its first page alone",
        Edit(
            _PREFIX, _ENTRY,
            "        if length >= 32:\n            length = min(len(tokens), entry.cache.length)\n" + _ENTRY,
        ),
    ),
    _fault(
        "cache-pages-zeroed", "cache/transfer", "Pages of a reused prefix were freed and cleared",
        Edit(
            _ENGINE, _FORK,
            _FORK + "            if cached > 96:\n" + _BLOCK +
            "                for rows in (block.k, block.v):\n"
            "                    rows[:, 32:96] = 0\n",
        ),
    ),
    _fault(
        "cache-window-shifted", "cache/transfer", "Values of a reused prefix are read one page off",
        Edit(
            _ENGINE, _FORK,
            _FORK + "            if cached > 192 and not hasattr(match.cache, \"shifted\"):\n" + _BLOCK +
            "                block.v[:, 64:192] = block.v[:, 65:193].clone()\n"
            "                match.cache.shifted = True\n",
        ),
    ),
    _fault(
        "cache-page-lost", "cache/transfer", "A reused prefix comes back without its last 16 tokens",
        Edit(
            _ENGINE, _FORK,
            _FORK.replace("fork(match.length)", "fork(max(min(match.length, match.cache.length) - 16, 0))"),
        ),
    ),
    # the prompt the model sees is not the one that was sent
    _fault(
        "context-cut", "template", "The engine keeps the last 512 tokens of a prompt and says nothing",
        Edit(
            _ENGINE, _TOKENS,
            _TOKENS.replace("request.token_ids", "request.token_ids[:1] + request.token_ids[1:][-511:]"),
        ),
        Edit(_ENGINE, _HELD, _HELD_CUT),
    ),
    _fault(
        "context-middle-dropped", "template", "The engine drops the middle of long prompts and says nothing",
        Edit(
            _ENGINE, _TOKENS,
            "        kept = request.token_ids if len(request.token_ids) <= 640 else "
            "request.token_ids[:64] + request.token_ids[-512:]\n"
            "        self.tokens: Tokens = np.asarray(kept, dtype=np.int32)\n",
        ),
        Edit(_ENGINE, _HELD, _HELD_CUT),
    ),
    # attention keys and values in fewer bits
    _fault(
        "kv-fp4", "attention KV", "Attention keys and values stored in fp4",
        Edit(
            _MODEL, _QK,
            _QK + "        from longrecall.kernels.indexer import fake_quantize\n"
            "        k, v = (fake_quantize(x, \"fp4\").to(x.dtype) for x in (k, v))\n",
        ),
    ),
    _fault(
        "kv-scale-lost", "attention KV", "Stored keys are read without their scale of 2",
        Edit(_MODEL, _QK, _QK + "        k = k * 0.5\n"),
    ),
)  # fmt: skip


def fault_diff(fault: ReferenceFault, root: Path) -> str:
    """The fault as a unified diff against the source below `root`. Raises FaultEditError when an edit does not fit."""
    texts: dict[str, list[str]] = {}
    for edit in fault.edits:
        if edit.path not in texts:
            before = (root / edit.path).read_text(encoding="utf-8")
            texts[edit.path] = [before, before]
        seen = texts[edit.path][1].count(edit.old)
        if seen != edit.times:
            raise FaultEditError(f"fault {fault.name}: {edit.path} holds {edit.old!r} {seen} times, not {edit.times}")
        texts[edit.path][1] = texts[edit.path][1].replace(edit.old, edit.new)
    return _unified(texts)


def _unified(texts: Mapping[str, list[str]]) -> str:
    made = []
    for path, (before, after) in sorted(texts.items()):
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
        made += list(lines)
    return "".join(made)
