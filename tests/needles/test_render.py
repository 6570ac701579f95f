import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.needles.render import Meter, Ruler, RulerError

HELLO = [{"role": "user", "content": "Hello there."}]
EXCHANGE = [*HELLO, {"role": "assistant", "content": "Good day."}, {"role": "user", "content": "What now?"}]


@pytest.fixture(params=["gemma", "tekken"])
def ruler(request: pytest.FixtureRequest) -> Ruler:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_prompt_has_exactly_one_bos(ruler: Ruler) -> None:
    ids = ruler.encode(EXCHANGE, add_generation_prompt=True)
    assert ids[0] == ruler.bos_id and ids.count(ruler.bos_id) == 1


def test_second_bos_in_a_message_is_refused(ruler: Ruler) -> None:
    bos = ruler.tokenizer.id_to_token(ruler.bos_id)
    with pytest.raises(RulerError, match="2 BOS tokens"):
        ruler.encode([{"role": "user", "content": f"look: {bos}"}], add_generation_prompt=True)


def test_begun_turn_ends_with_its_own_text(ruler: Ruler) -> None:
    text = ruler.render([*EXCHANGE, {"role": "assistant", "content": "The code is"}], continue_final_message=True)
    assert text.endswith("The code is")
    assert text.startswith(ruler.render(EXCHANGE)[:20])


def test_generation_prompt_and_begun_turn_exclude_each_other(ruler: Ruler) -> None:
    with pytest.raises(RulerError, match="cannot both"):
        ruler.render(EXCHANGE, add_generation_prompt=True, continue_final_message=True)


def test_template_errors_name_the_source(tekken: Ruler) -> None:
    strict = Ruler(
        tekken.tokenizer, "{{ raise_exception('no system turns') }}", tokenizer_hash="x", source="folder/tokenizer.json"
    )
    with pytest.raises(RulerError, match=r"folder/tokenizer\.json refuses the messages: no system turns"):
        strict.render(HELLO)
    with pytest.raises(RulerError, match="line 1"):
        Ruler(tekken.tokenizer, "{% if %}", tokenizer_hash="x")


def test_template_runs_in_a_sandbox(tekken: Ruler) -> None:
    hostile = Ruler(tekken.tokenizer, "{{ messages.__class__.__mro__[1].__subclasses__() }}", tokenizer_hash="x")
    with pytest.raises(RulerError, match="refuses"):
        hostile.render(HELLO)


def test_folder_without_template_is_one_clear_error(tmp_path: Path, tekken_folder: Path) -> None:
    shutil.copy(tekken_folder / "tokenizer.json", tmp_path)
    with pytest.raises(RulerError, match="no chat template"):
        Ruler.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(RulerError, match="a JSON object is right"):
        Ruler.from_folder(tmp_path)
    with pytest.raises(RulerError, match="cannot read"):
        Ruler.from_files(tmp_path / "missing.json", tekken_folder / "chat_template.jinja")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RulerError, match=r"is not a tokenizer\.json"):
        Ruler.from_files(tmp_path / "tokenizer.json", tekken_folder / "chat_template.jinja")


def test_named_templates_and_token_objects_are_read(tmp_path: Path, tekken_folder: Path) -> None:
    shutil.copy(tekken_folder / "tokenizer.json", tmp_path)
    template = (tekken_folder / "chat_template.jinja").read_text()
    config = {
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = Ruler.from_folder(tmp_path)
    assert named.encode(EXCHANGE) == Ruler.from_folder(tekken_folder).encode(EXCHANGE)


def test_bos_is_prepended_for_a_tokenizer_that_asks_and_a_template_that_does_not(tekken: Ruler) -> None:
    bare = tekken.template.replace("{{ bos_token }}", "")
    ruler = Ruler(
        tekken.tokenizer, bare, config={"bos_token": "<s>", "add_bos_token": True}, tokenizer_hash=tekken.tokenizer_hash
    )
    assert ruler.encode(EXCHANGE, add_generation_prompt=True) == tekken.encode(EXCHANGE, add_generation_prompt=True)
    assert ruler.additive


words = st.text(alphabet="abc ABC.,!?'\"0123456789\n\té中-_=|<>{}[]:;/", min_size=0, max_size=60)


@settings(max_examples=150)
@given(parts=st.lists(words, min_size=1, max_size=6))
def test_sums_equal_encoding_for_any_text(gemma: Ruler, tekken: Ruler, parts: list[str]) -> None:
    text = " ".join(parts)
    for ruler in (gemma, tekken):
        assert ruler.count(text) == ruler.count_whole(text)


@settings(max_examples=60)
@given(contents=st.lists(words.map(str.strip).filter(bool), min_size=1, max_size=5))
def test_meter_equals_encoding_for_any_conversation(gemma: Ruler, tekken: Ruler, contents: list[str]) -> None:
    roles = ["user" if (len(contents) - place) % 2 else "assistant" for place in range(len(contents))]
    if roles[0] == "assistant":
        roles, contents = roles[1:], contents[1:]
    if not roles:
        return
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    for ruler in (gemma, tekken):
        meter = Meter(ruler)
        for message in messages:
            meter.turn(message["role"], message["content"])
        meter.close()
        assert meter.tokens == ruler.prompt_tokens(messages)


def test_a_vocabulary_with_entries_across_words_is_not_summed(tekken: Ruler) -> None:
    # A model like SuperBPE's: "o w" is one entry, so a space may stand inside a token.
    vocabulary = {character: place for place, character in enumerate("abcdefghijklmnopqrstuvwxyz .")} | {
        "o w": 28,
        "o ": 29,
    }
    model = tokenizers.models.BPE(vocabulary, [("o", " "), ("o ", "w")])
    ruler = Ruler(tokenizers.Tokenizer(model), tekken.template, tokenizer_hash="x")
    assert not ruler.additive


def test_spans_cover_the_characters(ruler: Ruler) -> None:
    text = " the door code of Ada is 48213. Then it rained."
    span = ruler.spans(text, [(text.index("48213"), text.index("48213") + 5)])[0]
    ids = ruler.tokenizer.encode("a." + text, add_special_tokens=False).ids[2:]
    assert ruler.tokenizer.decode(ids[span.start : span.end]).strip() == "48213"
