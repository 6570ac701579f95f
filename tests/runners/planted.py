"""Small hand-made conversations in the shape of the reference recipe; tokens are white-space words here."""

import random

from longrecall.needles.schema import Ask, Conversation, Fact, Probe, Turn


def words(turns: tuple[Turn, ...]) -> int:
    return sum(len(turn.content.split()) for turn in turns)


def make(count: int, *, probes: int = 4, rungs: tuple[int, ...] = (60, 120), seed: int = 0) -> list[Conversation]:
    """`count` conversations of `probes` facts, each asked at every rung; prompt_tokens counts words."""
    made = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        names = [f"N{number}x{i}" for i in range(probes)]
        values = [f"{rng.randrange(10**5):05d}" for _ in names]
        turns: list[Turn] = []
        facts = []
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            fact_id = f"f{number}-{i}"
            sentence = f"The code of {name} is {value}."
            turns.append(Turn(turn_index=len(turns), role="user", content=f"Note: {sentence}", fact_ids=(fact_id,)))
            turns.append(Turn(turn_index=len(turns), role="assistant", content=f"Noted. {sentence}"))
            facts.append(
                Fact(fact_id=fact_id, entity=name, attribute="code", value=value, kind="single", turn_index=2 * i)
            )
        asked = tuple(
            Probe(
                probe_id=f"p{i}",
                kind="single",
                question=f"What is the code of {name}?",
                gold=value,
                live_fact=f"f{number}-{i}",
                distractor_values=tuple(v for v in values if v != value),
                answer_prefix=f"The code of {name} is",
            )
            for i, (name, value) in enumerate(zip(names, values, strict=True))
        )
        asks = []
        for rung in rungs:
            while words(tuple(turns)) < rung:
                turns.append(Turn(turn_index=len(turns), role="user", content="Tell me more, please."))
                turns.append(Turn(turn_index=len(turns), role="assistant", content="There is " + "more " * 9))
            for probe in asked:
                tail = (
                    Turn(turn_index=len(turns), role="user", content=probe.question),
                    Turn(turn_index=len(turns) + 1, role="assistant", content=probe.answer_prefix),
                )
                asks.append(
                    Ask(
                        rung=rung,
                        probe_id=probe.probe_id,
                        turn_end=len(turns),
                        tail=tail,
                        prompt_tokens=words((*turns, *tail)),
                    )
                )
        made.append(
            Conversation(
                conversation_id=f"c{number}",
                recipe="planted",
                seed=seed,
                tokenizer_hash="words",
                template_hash="none",
                rungs=rungs,
                turns=tuple(turns),
                facts=tuple(facts),
                probes=asked,
                asks=tuple(asks),
            )
        )
    return made


def messages_for(conversation: Conversation, ask: Ask) -> list[dict[str, str]]:
    turns = (*conversation.turns[: ask.turn_end], *ask.tail)
    return [{"role": turn.role, "content": turn.content} for turn in turns]
