import itertools
import json
import random
from pathlib import Path

import pytest

from longrecall.needles.filler import Prose, facts, training_conversations, wordings
from longrecall.needles.haystack import FillerError, Haystack, Walk, own_sentences, sentences_of
from longrecall.needles.lint import lint
from longrecall.needles.plant import make_conversations, make_haystack
from longrecall.needles.recipes import Element, Filler, Recipe
from longrecall.needles.render import Meter, Ruler
from longrecall.needles.values import value_words
from longrecall.needles.vocabulary import ATTRIBUTES, NAMES, SENTENCES, WORDS, split_words


def test_filler_words_are_neither_names_nor_values() -> None:
    words = {word for words in WORDS.values() for word in words}
    assert not words & value_words()
    assert not words & {name.lower() for name in NAMES}
    prose, rng = Prose(), random.Random(0)
    text = " ".join(prose.sentence(rng) for _ in range(3000))
    assert not any(character.isdigit() for character in text)
    assert not any(f" {attribute}" in text for attribute in ATTRIBUTES)
    assert "a a" not in text.split() and " a old " not in text


def test_splits_share_no_template_no_wording_and_no_word() -> None:
    for words in (*WORDS.values(), NAMES, ATTRIBUTES, SENTENCES):
        train, heldout = set(split_words(words, "train")), set(split_words(words, "heldout"))
        assert train and heldout and not train & heldout and train | heldout == set(words)
    assert not {w.statement for w in wordings("train")} & {w.statement for w in wordings("heldout")}


def test_training_conversations_state_their_facts_and_answer_truly() -> None:
    first = list(itertools.islice(training_conversations(5, split="train", words=600), 4))
    again = list(itertools.islice(training_conversations(5, split="train", words=600), 4))
    assert [c.messages for c in first] == [c.messages for c in again]
    for conversation in first:
        text = " ".join(message["content"] for message in conversation.messages)
        assert all(fact.statement in text for fact in conversation.facts)
        assert [message["role"] for message in conversation.messages[:2]] == ["user", "assistant"]
        last = conversation.messages[-1]["content"]
        assert any(last == f"{fact.answer_prefix} {fact.value}." for fact in conversation.facts)
        assert 500 < len(text.split()) < 800
    with pytest.raises(ValueError, match="500 facts"):
        facts(random.Random(0), 500, split="train")


def test_walk_repeats_no_sentence_before_all_were_used(tekken: Ruler) -> None:
    haystack = Haystack(tekken, Prose(), "walk", sentences=800)
    walk = Walk(haystack.pieces, random.Random(3))
    assert len({id(walk.next()) for _ in range(800)}) == 800
    other = Walk(haystack.pieces, random.Random(4))
    again = Walk(haystack.pieces, random.Random(3))
    assert [other.next().text for _ in range(16)] != [again.next().text for _ in range(16)]


def test_exact_sizes_come_out_exact(gemma: Ruler, tekken: Ruler) -> None:
    for ruler in (gemma, tekken):
        haystack = Haystack(ruler, Prose(), "sizes", sentences=800)
        rng = random.Random(0)
        walk = Walk(haystack.pieces, rng)
        for tokens in (*range(2, 140), 1000, 4001):
            pieces = haystack.exactly(rng, walk, tokens)
            assert pieces is not None and sum(piece.tokens for piece in pieces) == tokens, tokens
            pad = haystack.pad(rng, tokens)
            if pad is not None:
                meter = Meter(ruler)
                meter.turn("user", "Well.")
                before = meter.tokens
                meter.text(" " + pad)
                assert meter.tokens - before == tokens
        assert all(haystack.pad(rng, tokens) for tokens in range(2, 60))


TEXT = (
    "The garden was quiet that day. In 1984 the wall fell. Ada went home early. A tall amber falcon sat there. "
    "She said: <|im_end|> and left. The door code of the house was lost. The tide came in and the boats rose with it! "
    "Was anybody there? Nobody answered the call from the far side of the field. It rained. "
)


def test_own_text_is_cleaned(tmp_path: Path, tekken: Ruler) -> None:
    path = tmp_path / "essay.txt"
    path.write_text(
        "\n".join(f"{TEXT} Line {'x' * (i % 7)} had words in the letter {chr(97 + i % 26)} here." for i in range(40))
    )
    kept = own_sentences(Filler(path="text", data_files=str(path)), tekken)
    text = " ".join(kept)
    assert "garden was quiet" in text and "Was anybody there?" in text
    for gone in ("1984", "Ada", "falcon", "<|im_end|>", "door code"):
        assert gone not in text
    assert sentences_of("One two.  Three\nfour! Five?") == ["One two.", "Three four!", "Five?"]


def test_set_with_own_text_is_exact_and_true(tmp_path: Path, tekken: Ruler) -> None:
    rows = [
        {
            "body": " ".join(
                Prose().sentence(random.Random(i * 100 + j)).replace("The", "That “famous”") for j in range(9)
            )
        }
        for i in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    filler = Filler(path="json", data_files=str(tmp_path / "rows.jsonl"), column="body")
    chosen = Recipe(name="own", elements=(Element(count=3, distractors=3),), filler=filler)
    haystack = make_haystack(chosen, tekken, 0)
    made = list(make_conversations(chosen, ruler=tekken, rungs=[800, 3000], count=3, seed=0, haystack=haystack))
    assert lint(made, ruler=tekken) == []
    assert any("famous" in turn.content for conversation in made for turn in conversation.turns)
    with pytest.raises(FillerError, match="rung 100000 needs as many"):
        list(make_conversations(chosen, ruler=tekken, rungs=[100_000], count=1, seed=0, haystack=haystack))


def test_unusable_filler_is_one_clear_error(tmp_path: Path, tekken: Ruler) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Only this one sentence.\nAnd 2 others.")
    with pytest.raises(FillerError, match="1 usable sentences of 2; at least 64"):
        own_sentences(Filler(path="text", data_files=str(path)), tekken)
    with pytest.raises(FillerError, match="no column 'body'; its columns are text"):
        own_sentences(Filler(path="text", data_files=str(path), column="body"), tekken)
    with pytest.raises(FillerError, match="cannot read the filler"):
        own_sentences(Filler(path="text", data_files=str(tmp_path / "missing.txt")), tekken)
