"""Prefix cache: a radix tree over token ids that finds the stored sequence sharing the longest prefix with a prompt.

Page granularity is one token: any prefix of any stored sequence can be reused, because a `SequenceCache` forks at every
length. Each salt has its own tree. Over the memory bound, entries that repeat others almost wholly go first (they free
much and cost little to recompute), then the least recently used.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longrecall.runners.reference.interface import SequenceCache

Tokens = npt.NDArray[np.int32]

MOSTLY_SHARED = 8  # an entry holding less than 1/8 of its tokens alone is the first to go


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of equal leading tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class Match(NamedTuple):
    """The longest reusable prefix."""

    length: int
    cache: SequenceCache


@dataclass(eq=False)
class _Node:
    key: Tokens
    """Tokens on the edge from the parent."""
    parent: "_Node | None"
    depth: int
    """Tokens from the root to the end of this edge."""
    children: dict[int, "_Node"] = field(default_factory=dict)
    entry: "Entry | None" = None
    num_entries: int = 0
    """Entries at or below this node; a node without any is removed."""


@dataclass(eq=False)
class Entry:
    """One stored sequence; hold on to it to replace or remove it."""

    salt: str
    cache: SequenceCache
    nbytes: int
    pinned: bool
    node: _Node


class PrefixCache:
    """Stored sequences by token prefix, at most `capacity_bytes` of them not counting pinned ones."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._roots: dict[str, _Node] = {}
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self.nbytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Tokens, *, salt: str = "", limit: int | None = None) -> Match | None:
        """Longest stored prefix of `tokens[:limit]`, or None when not even the first token is stored."""
        node = self._roots.get(salt)
        if node is None:
            return None
        tokens = tokens[:limit]
        length = 0
        while length < len(tokens) and (child := node.children.get(int(tokens[length]))) is not None:
            shared = common_prefix(child.key, tokens[length:])
            length += shared
            node = child
            if shared < len(child.key):
                break
        if not length:
            return None
        while node.entry is None:  # every node has an entry at or below it
            node = next(iter(node.children.values()))
        entry = node.entry
        self._entries.move_to_end(entry)
        return Match(length, entry.cache)

    def insert(self, tokens: Tokens, cache: SequenceCache, *, salt: str = "", pinned: bool = False) -> Entry | None:
        """Store `cache`, whose first len(tokens) entries are those of `tokens`; the entry, or None if it does not fit.

        A pinned entry belongs to a running sequence: it is not counted and not evicted until it is replaced by an
        unpinned one. A sequence stored before under the same tokens gives way.
        """
        if not len(tokens):
            return None
        node = self._node_for(tokens, salt)
        if node.entry is not None:
            if node.entry.pinned and not pinned:
                return None  # the running twin will store itself when it ends
            self.remove(node.entry)
            node = self._node_for(tokens, salt)
        entry = Entry(salt=salt, cache=cache, nbytes=0 if pinned else cache.nbytes, pinned=pinned, node=node)
        node.entry = entry
        self._entries[entry] = None
        self.nbytes += entry.nbytes
        step: _Node | None = node
        while step is not None:
            step.num_entries += 1
            step = step.parent
        self._evict()
        return entry if entry in self._entries else None

    def remove(self, entry: Entry) -> None:
        """Forget an entry; nothing happens if it is gone already."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.nbytes -= entry.nbytes
        entry.node.entry = None
        step: _Node | None = entry.node
        while step is not None:
            step.num_entries -= 1
            if step.num_entries == 0:
                if step.parent is not None:
                    del step.parent.children[int(step.key[0])]
                else:
                    del self._roots[entry.salt]
            elif step.entry is None and step.parent is not None and len(step.children) == 1:
                self._join_only_child(step)
            step = step.parent

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._entries.clear()
        self.nbytes = 0

    def _node_for(self, tokens: Tokens, salt: str) -> _Node:
        """The node that ends exactly at `tokens`, made by splitting or extending the tree."""
        node = self._roots.setdefault(salt, _Node(key=tokens[:0], parent=None, depth=0))
        while node.depth < len(tokens):
            rest = tokens[node.depth :]
            child = node.children.get(int(rest[0]))
            if child is None:
                child = _Node(key=rest, parent=node, depth=len(tokens))
                node.children[int(rest[0])] = child
                return child
            shared = common_prefix(child.key, rest)
            if shared < len(child.key):
                middle = _Node(
                    key=child.key[:shared], parent=node, depth=node.depth + shared, num_entries=child.num_entries
                )
                node.children[int(rest[0])] = middle
                middle.children[int(child.key[shared])] = child
                child.key, child.parent = child.key[shared:], middle
                child = middle
            node = child
        return node

    def _join_only_child(self, node: _Node) -> None:
        (child,) = node.children.values()
        assert node.parent is not None
        child.key, child.parent = np.concatenate([node.key, child.key]), node.parent
        node.parent.children[int(node.key[0])] = child

    def _own_tokens(self, entry: Entry) -> int:
        """Tokens that no other entry holds."""
        node: _Node = entry.node
        while node.num_entries == 1 and node.parent is not None:
            node = node.parent
        return entry.node.depth - node.depth

    def _evict(self) -> None:
        while self.nbytes > self.capacity_bytes:
            candidates = [entry for entry in self._entries if not entry.pinned]
            victim = next(
                (entry for entry in candidates if self._own_tokens(entry) * MOSTLY_SHARED < entry.node.depth),
                candidates[0],
            )
            self.remove(victim)
            self.num_evicted += 1
