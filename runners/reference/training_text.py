"""Token sequences to train and judge the indexer: conversations with planted facts, among prose and documentation.

Split "train" trains, "heldout" judges: other sentence templates, fact wordings, names, attributes, vocabulary. A third
of the assistants' prose is replaced by docstrings of Python's standard library, so that the haystack is not only
template prose.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from longrecall.needles.filler import TrainingConversation, training_conversations
from longrecall.needles.render import Ruler
from longrecall.needles.vocabulary import Split

WORDS_PER_TOKEN = 0.72
"""Measured on the generator's text under Gemma's tokenizer; only decides how long a conversation is asked for."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question of an evaluation sequence, answered by teacher forcing."""

    answer: tuple[int, int]
    """Token span [start, end) of the value in the answer."""
    stated: tuple[int, int]
    """Token span of the value where the fact is stated."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Exactly `len(tokens)` tokens, the first one BOS."""

    tokens: np.ndarray
    """int32."""
    asked: list[Asked] = field(default_factory=list)


@lru_cache(maxsize=1)
def docstrings() -> tuple[str, ...]:
    """Paragraphs of the standard library's docstrings, as installed with this Python, in a fixed order."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    text = " ".join(paragraph.split())
                    if 80 <= len(text) <= 900:
                        found[text] = None
    return tuple(found)


def _conversation_messages(
    conversation: TrainingConversation, rng: random.Random, paragraphs: tuple[str, ...]
) -> list[dict[str, str]]:
    values = [fact.value for fact in conversation.facts]
    messages = []
    for message in conversation.messages:
        content = message["content"]
        prose = message["role"] == "assistant" and not any(value in content for value in values)
        if prose and rng.random() < 1 / 3:
            content = rng.choice(paragraphs)
        messages.append({"role": message["role"], "content": content})
    return messages


def _spans(text: str, value: str) -> list[tuple[int, int]]:
    spans, at = [], text.find(value)
    while at >= 0:
        spans.append((at, at + len(value)))
        at = text.find(value, at + 1)
    return spans


def sequences(ruler: Ruler, seed: int, *, split: Split, tokens: int, docs: bool = True) -> Iterator[Sequence]:
    """Endless sequences of exactly `tokens` tokens: the end of a conversation, with its questions and answers."""
    rng = random.Random(f"sequences:{split}:{seed}:{tokens}")
    paragraphs = docstrings() if docs else ()
    bos = ruler.encode([{"role": "user", "content": "x"}], add_generation_prompt=False)[0]
    words = int(tokens * WORDS_PER_TOKEN * 1.15) + 40
    for conversation in training_conversations(seed + tokens, split=split, words=words):
        messages = _conversation_messages(conversation, rng, paragraphs) if docs else conversation.messages
        text = ruler.render(messages, add_generation_prompt=False)
        encoded = ruler.tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = np.array(encoded.ids, np.int32), np.array(encoded.offsets)
        if len(ids) < tokens:
            continue
        cut = len(ids) - (tokens - 1)
        asked = []
        for fact in conversation.facts:
            places = []
            for start, end in _spans(text, fact.value):
                inside = np.flatnonzero(
                    (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
                )
                if len(inside) and inside[0] > cut:
                    places.append((int(inside[0]) - cut + 1, int(inside[-1]) + 1 - cut + 1))
            answered = f"{fact.answer_prefix} {fact.value}." in messages[-1]["content"] or any(
                m["content"] == f"{fact.answer_prefix} {fact.value}." for m in messages[-8:]
            )
            if answered and len(places) >= 2:
                asked.append(Asked(answer=places[-1], stated=places[0]))
        yield Sequence(tokens=np.concatenate(([bos], ids[cut:])).astype(np.int32), asked=asked)
