"""Flips: probes that one build answers right and another does not, with the conversation around the fact.

A flip is read on the same prompt (conversation, probe, rung, arm, repeat). Missing data is no flip. Replies come from
untrusted models, so `visible` makes every control, bidi and broken character show itself before a page escapes it.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from longrecall.evals.schema import MISSING, Score
from longrecall.needles.schema import Conversation, Turn
from longrecall.runners.schema import Replay

BASE = "base"
WINDOW_CHARS = 420
"""Characters of one turn shown around the fact; enough for the statement and its neighbours."""
REPLY_CHARS = 480


class Prompt(NamedTuple):
    """What two builds must share for their replies to be compared."""

    conversation_id: str
    probe_id: str
    rung: int
    arm: str
    repeat: int


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One rung's pair of replies; texts are cut to `REPLY_CHARS` and made visible."""

    rung: int
    arm: str
    repeat: int
    direction: Literal["lost", "gained"]
    base_outcome: str
    base_text: str
    candidate_outcome: str
    candidate_text: str
    depth_pct: float | None
    distance_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One turn of the window; `marked` is the planted value in it, to be highlighted ("" when not in this turn)."""

    role: str
    before: str
    marked: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Every rung at which one probe flips between the base and one build."""

    flip_id: str
    build_id: str
    conversation_id: str
    probe_id: str
    question: str
    gold: str
    answer_prefix: str
    fact_turn: int | None
    window: tuple[Line, ...]
    replies: tuple[Reply, ...]


def visible(text: str | None, limit: int = REPLY_CHARS) -> str:
    """Text that cannot act on a page or a terminal: control, format and lone surrogate characters become ⟦U+….⟧.

    Newlines and tabs stay. Longer text is cut in the middle with the number of characters left out. A run of more than
    four combining marks is cut, so that nothing grows out of its line.
    """
    if text is None:
        return ""
    if len(text) > limit:
        head, tail = limit * 3 // 4, limit // 4
        text = f"{text[:head]} … {len(text) - head - tail:,} more characters … {text[-tail:]}"
    out: list[str] = []
    combining = 0
    for character in text:
        kind = unicodedata.category(character)
        combining = combining + 1 if kind in ("Mn", "Me") else 0
        if combining > 4:
            continue
        if character in "\n\t":
            out.append(character)
        elif kind in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") or (kind == "Cn" and ord(character) & 0xFFFE == 0xFFFE):
            out.append(f"⟦U+{ord(character):04X}⟧")
        else:
            out.append(character)
    return "".join(out)


def around(turn: Turn, value: str) -> Line:
    """The part of a turn around `value` (its start when the value is not in it)."""
    at = turn.content.find(value) if value else -1
    if at < 0:
        return Line(role=turn.role, before=visible(turn.content, WINDOW_CHARS), marked="", after="")
    end = at + len(value)
    side = WINDOW_CHARS // 2
    before, after = turn.content[max(0, at - side) : at], turn.content[end : end + side]
    return Line(
        role=turn.role,
        before=("… " if at > side else "") + visible(before, WINDOW_CHARS),
        marked=visible(value),
        after=visible(after, WINDOW_CHARS) + (" …" if len(turn.content) > end + side else ""),
    )


def find_flips(
    scores: Sequence[Score], conversations: Iterable[Conversation], replays: Iterable[Replay], builds: Sequence[str]
) -> dict[str, list[Flip]]:
    """Flips of each build of `builds` against the base, losses at the longest rungs first."""
    outcome: dict[str, dict[Prompt, Score]] = defaultdict(dict)
    for score in scores:
        key = Prompt(score.conversation_id, score.probe_id, score.rung, score.arm, score.repeat)
        outcome[score.build_id][key] = score
    base = {key: score for key, score in outcome[BASE].items() if score.outcome not in MISSING}
    wanted: dict[str, dict[tuple[str, str], list[Prompt]]] = {}
    needed: set[tuple[str, Prompt]] = set()
    for build in builds:
        groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
        for key, score in outcome[build].items():
            other = base.get(key)
            if other is None or score.outcome in MISSING or (score.outcome == "ok") == (other.outcome == "ok"):
                continue
            groups[key.conversation_id, key.probe_id].append(key)
            needed |= {(BASE, key), (build, key)}
        wanted[build] = groups
    texts = {
        (replay.build_id, key): replay.response.text
        for replay in replays
        for key in [Prompt(replay.conversation_id, replay.probe_id, replay.rung, replay.arm, replay.repeat)]
        if (replay.build_id, key) in needed
    }
    known = {conversation.conversation_id: conversation for conversation in conversations}
    found: dict[str, list[Flip]] = {}
    for build, groups in wanted.items():
        flips = []
        for (conversation_id, probe_id), keys in groups.items():
            replies = tuple(
                Reply(
                    rung=key.rung,
                    arm=key.arm,
                    repeat=key.repeat,
                    direction="lost" if base[key].outcome == "ok" else "gained",
                    base_outcome=base[key].outcome,
                    base_text=visible(texts.get((BASE, key))),
                    candidate_outcome=outcome[build][key].outcome,
                    candidate_text=visible(texts.get((build, key))),
                    depth_pct=base[key].depth_pct,
                    distance_tokens=base[key].distance_tokens,
                )
                for key in sorted(keys, key=lambda key: (key.rung, key.arm, key.repeat))
            )
            flips.append(_flip(build, conversation_id, probe_id, replies, known.get(conversation_id)))
        flips.sort(key=lambda flip: (flip.replies[-1].direction == "gained", -flip.replies[-1].rung, flip.flip_id))
        found[build] = flips
    return found


def _flip(
    build: str, conversation_id: str, probe_id: str, replies: tuple[Reply, ...], conversation: Conversation | None
) -> Flip:
    flip_id = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (build, conversation_id, probe_id))
    probe = next((p for p in conversation.probes if p.probe_id == probe_id), None) if conversation else None
    fact = (
        next((f for f in conversation.facts if probe and f.fact_id == probe.live_fact), None) if conversation else None
    )
    window: tuple[Line, ...] = ()
    if conversation is not None and fact is not None:
        near = range(fact.turn_index - 1, fact.turn_index + 3)
        window = tuple(around(turn, fact.value) for turn in conversation.turns if turn.turn_index in near)
    return Flip(
        flip_id=flip_id,
        build_id=build,
        conversation_id=conversation_id,
        probe_id=probe_id,
        question=visible(probe.question if probe else None),
        gold=visible(probe.gold if probe else None),
        answer_prefix=visible(probe.answer_prefix if probe else None),
        fact_turn=fact.turn_index if fact else None,
        window=window,
        replies=replies,
    )
