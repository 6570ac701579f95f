"""The ruler: how many tokens a conversation takes under one tokenizer and one chat template, exactly.

    ruler = Ruler.from_folder("~/models/some-model")     # tokenizer.json, tokenizer_config.json [, chat_template.jinja]
    ruler.render(messages, add_generation_prompt=True)    # the text the server feeds its model
    ruler.encode(messages, add_generation_prompt=True)    # its token ids, exactly one BOS

Rendering follows transformers' `apply_chat_template` (jinja2 sandbox, trimmed blocks, `continue_final_message` cuts
after the final message's content), which vLLM and SGLang call. Encoding adds no special tokens of its own: the template
writes the BOS. A tokenizer that asks for one (`add_bos_token`) whose template writes none gets it prepended.

Counting by sums. Tokenising a 131,072-token conversation costs 0.2 to 0.4 CPU-s; adding up the counts of its words
costs a tenth of that. The sum is exact when no token reaches across a cut. A cut is made only before a single space
that follows and precedes ordinary characters, or before a control token, and only where two proofs hold for the
tokenizer at hand: no vocabulary entry contains "<previous character><space>", so no merge can bridge the cut and the
merges on either side are independent; and encoding every such pair of characters shows a token boundary there, so no
pre-tokenizer rule bridges it. A last self-test compares a whole rendered conversation with the sum. A tokenizer or
template that fails any of them is `additive = False`: then every prompt is encoded whole instead (`needles.plant` does
so), slower and as exact.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from longrecall.needles.schema import Ask, Conversation, Turn
from longrecall.needles.tokenizer_file import TokenizerFile, bridging

Message = Mapping[str, Any]
_ANCHOR = "a."
"""Counted before a chunk and taken off again, so that rules for the start of a text do not touch the chunk."""
_CUT_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?)'\""
"""Characters that may stand on either side of a cut, if the tokenizer passes the proofs for them."""


class RulerError(ValueError):
    """The tokenizer, the template or the messages are unusable; the message names the file or value."""


def messages_for(conversation: Conversation, ask: Ask) -> list[dict[str, str]]:
    """The chat messages of one planned prompt: the history `turns[:turn_end]`, then the tail."""
    return as_messages((*conversation.turns[: ask.turn_end], *ask.tail))


def as_messages(turns: Iterable[Turn]) -> list[dict[str, str]]:
    """Turns as chat messages."""
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def continues(messages: Sequence[Message]) -> bool:
    """Whether the prompt ends inside a begun assistant turn (send `continue_final_message`, no generation prompt)."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(fmt: str) -> str:
    # A template that prints the date would change the prompt overnight; the epoch keeps its length and bytes fixed.
    return datetime(2026, 1, 1, tzinfo=UTC).strftime(fmt)


class Span(NamedTuple):
    """Half-open range of token positions."""

    start: int
    end: int


def parse_template_args(text: str) -> dict[str, Any]:
    """Template variables written as a JSON object; raises RulerError."""
    try:
        variables = json.loads(text)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise RulerError(f"--template-args {text!r} is not a JSON object")
    return variables


class Ruler:
    """One tokenizer with one chat template.

    `template_args` are the variables the server gives its template besides the messages (the thinking policy:
    {"enable_thinking": False}); they are part of `template_hash`.
    """

    def __init__(
        self,
        tokenizer: TokenizerFile | tokenizers.Tokenizer,
        template: str,
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer_hash: str,
        template_args: Mapping[str, Any] | None = None,
        source: str = "tokenizer",
    ) -> None:
        config = config or {}
        self._file = tokenizer
        self.template = template
        self.template_args = dict(template_args or {})
        self.tokenizer_hash = tokenizer_hash
        """sha256 of tokenizer.json."""
        payload = template + (json.dumps(self.template_args, sort_keys=True) if self.template_args else "")
        self.template_hash = hashlib.sha256(payload.encode()).hexdigest()
        self.source = source
        self._tokens = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise RulerError(
                f"the chat template of {source} is not valid jinja2 (line {error.lineno}): {error}"
            ) from error
        known = tokenizer.any if isinstance(tokenizer, TokenizerFile) else tokenizer
        bos = self._tokens["bos_token"]
        self.bos_id = known.token_to_id(bos) if bos else None
        if bos and self.bos_id is None:  # no added token, and not in the plain part of the vocabulary
            self.bos_id = self.tokenizer.token_to_id(bos)
        self._control = [token for token in known.get_added_tokens_decoder().values() if token.special]
        self.special_strings = tuple(sorted({token.content for token in self._control}))
        """Texts that the tokenizer turns into control tokens; filler and facts must hold none of them."""
        self._counts: dict[str, int] = {}
        self.exchanges: dict[tuple[str | None, str, str], tuple[str, int, str]] = {}
        """First chunk, tokens of the middle and last chunk of exchanges that `Meter.exchange` has counted."""
        self._prepend_bos = False
        if self.bos_id is not None and config.get("add_bos_token"):
            shown = self.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
            self._prepend_bos = not shown.startswith(self._tokens["bos_token"] or "")

    @classmethod
    def from_folder(cls, path: str | Path, *, template_args: Mapping[str, Any] | None = None) -> "Ruler":
        """Read a model folder's tokenizer.json and chat template (chat_template.jinja, else tokenizer_config.json)."""
        folder = Path(path).expanduser()
        config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = _read_json(config_path) if config_path.exists() else {}
        if template_path.exists():
            template = template_path.read_text(encoding="utf-8")
        else:
            template = _named_template(config.get("chat_template"), config_path)
        return cls._make(folder / "tokenizer.json", template, config, template_args)

    @classmethod
    def from_files(
        cls,
        tokenizer_json: str | Path,
        template_jinja: str | Path,
        *,
        bos_token: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> "Ruler":
        """Read a tokenizer.json and a .jinja template kept anywhere."""
        try:
            template = Path(template_jinja).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise RulerError(f"cannot read the chat template {template_jinja}: {error.strerror}") from error
        return cls._make(Path(tokenizer_json).expanduser(), template, {"bos_token": bos_token}, template_args)

    @classmethod
    def _make(
        cls, path: Path, template: str, config: Mapping[str, Any], template_args: Mapping[str, Any] | None
    ) -> "Ruler":
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RulerError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        try:
            tokenizer = TokenizerFile(content, hashlib.sha256(content).hexdigest())
            _ = tokenizer.any
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise RulerError(f"{path} is not a tokenizer.json: {error}") from error
        return cls(
            tokenizer,
            template,
            config=config,
            tokenizer_hash=tokenizer.sha256,
            template_args=template_args,
            source=str(path),
        )

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The whole tokenizer; reading it takes seconds, and plain text needs only a part of it."""
        return self._file.whole if isinstance(self._file, TokenizerFile) else self._file

    def _encoding(self, text: str) -> tokenizers.Encoding:
        tokenizer = self._file.for_text(text) if isinstance(self._file, TokenizerFile) else self._file
        return tokenizer.encode(text, add_special_tokens=False)

    def _length(self, text: str) -> int:
        tokenizer = self._file.for_text(text) if isinstance(self._file, TokenizerFile) else self._file
        return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text the server feeds its model."""
        if continue_final_message and add_generation_prompt:
            raise RulerError("continue_final_message and add_generation_prompt cannot both be asked for")
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **{**self._tokens, **self.template_args},
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RulerError(f"the chat template of {self.source} refuses the messages: {error}") from error
        if continue_final_message:
            final = str(messages[-1]["content"]) if messages else ""
            at = text.rfind(final.strip()) if final.strip() else -1
            if at < 0:
                raise RulerError(
                    f"the chat template of {self.source} does not show the final message it should continue"
                )
            kept = final.lstrip() if text[at : at + len(final.lstrip())] == final else final.strip()
            text = text[: at + len(kept)]
        return text

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of the rendered messages; exactly one BOS where the model has one, anything else is an error."""
        text = self.render(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        ids = self.encode_text(text)
        if self.bos_id is not None and (self._prepend_bos or (self._tokens["bos_token"] or "") in self.template_start):
            if (found := ids.count(self.bos_id)) != 1:
                raise RulerError(
                    f"the rendered prompt holds {found} BOS tokens ({self._tokens['bos_token']}); 1 is right"
                )
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        ids: list[int] = self._encoding(text).ids
        return [self.bos_id, *ids] if self._prepend_bos and self.bos_id is not None else ids

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        """Length of a prompt as a server sends it: begun assistant turn continued, else with a generation prompt."""
        begun = continues(messages)
        return len(self.encode(messages, add_generation_prompt=not begun, continue_final_message=begun))

    @cached_property
    def template_start(self) -> str:
        """What the template writes before the first user message."""
        text = self.render([{"role": "user", "content": "\ue000"}], add_generation_prompt=True)
        return text[: max(text.find("\ue000"), 0)]

    # Counting by sums

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        """Zero-width pattern of the proven cuts; None when even letters do not pass."""
        before, after = self._proven
        if not set("aeiostn.") <= before or not set("aeTS") <= after:
            return None
        specials = [token.content for token in self._control if not (token.lstrip or token.rstrip)]
        specials = self._used_specials(sorted(specials, key=len, reverse=True))
        words = rf"(?<=[{re.escape(''.join(sorted(before)))}])(?= [{re.escape(''.join(sorted(after)))}])"
        control = f"|(?={'|'.join(map(re.escape, specials))})" if specials else ""
        return re.compile(words + control)

    def _used_specials(self, specials: Iterable[str]) -> list[str]:
        shown = self.template + "".join(text or "" for text in self._tokens.values())
        return [text for text in specials if text in shown]

    @cached_property
    def _proven(self) -> tuple[set[str], set[str]]:
        """Characters that may stand before and after a cut."""
        if isinstance(self._file, TokenizerFile):
            bridged = self._file.bridging
        else:
            bridged = bridging(self._file.get_vocab(with_added_tokens=True))
        before = {character for character in _CUT_CHARACTERS if character not in bridged}
        after = set(_CUT_CHARACTERS) - set(".,:;!?)'\"")
        pairs = [(left, right) for left in sorted(before) for right in ("a", "T", "q", "7", "0")]
        pairs += [(left, right) for left in ("a", ".", "3", ",") for right in sorted(after)]
        texts = [f"xy{left} {right}bc" for left, right in pairs]
        for (left, right), encoding in zip(pairs, map(self._encoding, texts), strict=True):
            # The text is one word, a space and another; some token must start or end exactly at the cut (offset 3).
            if not any(start in (3, 4) and end > 3 for start, end in encoding.offsets) or any(
                start < 3 < end for start, end in encoding.offsets
            ):
                before.discard(left)
                if left in "a.3,":
                    after.discard(right)
        return before, after

    def joins(self, text: str) -> bool:
        """Whether text can follow and precede other text, with a space between, at proven cuts."""
        if self._cut is None:
            return bool(text)
        before, after = self._proven
        return bool(text) and text[0] in after and text[-1] in before

    def chunks(self, text: str) -> list[str]:
        """The text cut at every proven cut; counts of the chunks add up."""
        return self._cut.split(text) if self._cut is not None else [text]

    def count_chunk(self, chunk: str, *, first: bool = False) -> int:
        """Tokens of one chunk within a text; `first`: it begins the prompt."""
        if first:
            return len(self.encode_text(chunk))
        count = self._counts.get(chunk)
        if count is None:
            count = self._counts[chunk] = self._length(_ANCHOR + chunk) - self._anchor_count
        return count

    def count(self, text: str) -> int:
        """Tokens of text that follows other text at a proven cut."""
        return sum(map(self.count_chunk, self.chunks(text)))

    def count_whole(self, text: str) -> int:
        """The same by encoding the text as one."""
        return self._length(_ANCHOR + text) - self._anchor_count

    def find(self, messages: Sequence[Message], place: int, text: str) -> Span | None:
        """Token range in the prompt of `text` in the content of message number `place`; None when it is not shown."""
        return self.find_all(messages, place, [text])[0]

    def find_all(self, messages: Sequence[Message], place: int, texts: Sequence[str]) -> list[Span | None]:
        """`find` of several texts; the prompt is encoded once."""
        begun = continues(messages)
        rendered = self.render(messages, add_generation_prompt=not begun, continue_final_message=begun)
        start = rendered.find(str(messages[place]["content"]).strip())
        offsets = self._encoding(rendered).offsets
        shift = 1 if self._prepend_bos else 0

        def span(text: str) -> Span | None:
            at = rendered.find(text, start) if start >= 0 else -1
            if at < 0:
                return None
            inside = [
                token
                for token, (left, right) in enumerate(offsets)
                if left < at + len(text) and right > at and left < right
            ]
            return Span(inside[0] + shift, inside[-1] + 1 + shift) if inside else None

        return [span(text) for text in texts]

    @cached_property
    def _anchor_count(self) -> int:
        return self._length(_ANCHOR)

    @cached_property
    def layout(self) -> "Layout":
        """The template's text between contents."""
        return _learn_layout(self)

    @cached_property
    def additive(self) -> bool:
        """Whether sums of chunk counts are proven exact for this tokenizer and template."""
        if self._cut is None or not self.layout.exact:
            return False
        sample = [
            {"role": "user", "content": "Please note that the door code of Ada is 48213. What else is new?"},
            {
                "role": "assistant",
                "content": "Noted. The old captain, as ever, repaired the lantern; it rained (a lot).",
            },
        ] * 4
        sample.append({"role": "user", "content": "Right. What is the door code of Ada?"})
        for tail in ([], [{"role": "assistant", "content": "The door code of Ada is"}]):
            messages = [*sample, *tail]
            meter = Meter(self)
            for turn in messages:
                meter.turn(turn["role"], turn["content"], begun=turn in tail)
            meter.close()
            if meter.tokens != self.prompt_tokens(messages):
                return False
        return True

    def spans(self, text: str, ranges: Sequence[tuple[int, int]]) -> list[Span]:
        """Token ranges, counted from the start of `text`, that cover the given character ranges.

        `text` must follow other text at a proven cut (or be a whole prompt's start).
        """
        encoding = self._encoding(_ANCHOR + text)
        shift, skipped = len(_ANCHOR), self._anchor_count
        out = []
        for start, end in ranges:
            inside = [
                place - skipped
                for place, (left, right) in enumerate(encoding.offsets)
                if right > start + shift and left < end + shift and right > left
            ]
            out.append(Span(min(inside), max(inside) + 1))
        return out


class Layout(NamedTuple):
    """The template's own text around the contents of a prompt."""

    opening: dict[str, str]
    """By role of the first message: the text before its content."""
    between: dict[tuple[str, str], str]
    """By (role, next role): the text between two contents."""
    closing: dict[str, str]
    """By role of the last message: what ends the prompt (nothing after a begun assistant turn)."""
    begun: str
    """The text between the last user content and the begun assistant turn that ends the prompt."""
    exact: bool
    """Whether it depends on neighbouring roles alone; if not, the first text seen stands for all."""


def _learn_layout(ruler: Ruler) -> Layout:
    """Render marked contents in prompts of several shapes and lengths."""
    opening: dict[str, str] = {}
    between: dict[tuple[str, str], str] = {}
    closing: dict[str, str] = {}
    begun: dict[str, str] = {}
    exact = True
    exchange = ["user", "assistant"]
    shapes = [[*exchange * n, "user"] for n in (0, 1, 2, 4)]
    shapes += [["system", *exchange * n, "user"] for n in (1, 3)]
    shapes += [["user", "assistant", "tool", "assistant", *exchange * n, "user"] for n in (0, 2)]
    shapes += [["system", "user", "assistant", "tool", "assistant", *exchange, "user"]]
    shapes += [[*shape, "assistant"] for shape in shapes[:3]]

    def learn(table: dict[Any, str], key: object, text: str) -> None:
        nonlocal exact
        exact &= table.setdefault(key, text) == text

    for shape in shapes:
        contents = [f"\ue000{place}\ue001" for place in range(len(shape))]
        messages = [{"role": role, "content": content} for role, content in zip(shape, contents, strict=True)]
        ends_begun = shape[-1] == "assistant"
        try:
            text = ruler.render(messages, add_generation_prompt=not ends_begun, continue_final_message=ends_begun)
        except RulerError:
            if "tool" in shape or "system" in shape:
                continue  # a template may know no such role; a recipe that needs it gets the template's own error
            raise
        pieces: list[str] = []
        for content in contents:
            piece, found, rest = text.partition(content)
            if found:
                text = rest
            else:
                exact, piece = False, ""  # the template drops or changes this content
            pieces.append(piece)
        learn(opening, shape[0], pieces[0])
        learn(closing, shape[-1], text)
        for place in range(1, len(shape)):
            if ends_begun and place == len(shape) - 1:
                learn(begun, "", pieces[place])
            else:
                learn(between, (shape[place - 1], shape[place]), pieces[place])
    return Layout(opening=opening, between=between, closing=closing, begun=begun[""], exact=exact)


class Meter:
    """Running token count of a growing prompt; exact when the ruler is additive."""

    __slots__ = ("_first", "_pending", "_role", "_ruler", "_total")

    def __init__(self, ruler: Ruler) -> None:
        self._ruler = ruler
        self._total = 0
        self._pending = ""
        self._role: str | None = None
        self._first = True

    def copy(self) -> "Meter":
        """A branch of this count."""
        other = Meter(self._ruler)
        other._total, other._pending, other._role, other._first = self._total, self._pending, self._role, self._first
        return other

    @property
    def tokens(self) -> int:
        """Tokens so far, if the prompt ended here."""
        return self._total + (self._ruler.count_chunk(self._pending, first=self._first) if self._pending else 0)

    @property
    def pending(self) -> str:
        """Text since the last cut; `tokens_before_pending` counts what stands before it."""
        return self._pending

    @property
    def tokens_before_pending(self) -> int:
        return self._total

    def text(self, text: str) -> None:
        """Append raw text."""
        chunks = self._ruler.chunks(self._pending + text)
        for chunk in chunks[:-1]:
            if chunk:
                self._total += self._ruler.count_chunk(chunk, first=self._first)
                self._first = False
        self._pending = chunks[-1]

    def counted(self, body_tokens: int, last_chunk: str) -> None:
        """Append a piece that begins at a proven cut: tokens of all but its last chunk, and that chunk."""
        self._total += (self._ruler.count_chunk(self._pending, first=self._first) if self._pending else 0) + body_tokens
        self._first = False
        self._pending = last_chunk

    def exchange(self, user: str, assistant: str) -> None:
        """Append a user turn and the beginning of the assistant's; the same pair is cut and counted once."""
        ruler = self._ruler
        key = (self._role, user, assistant)
        known = ruler.exchanges.get(key)
        if known is None:
            lead = ruler.layout.between.get((self._role or "", "user"), " ")
            chunks = ruler.chunks(lead + user + ruler.layout.between["user", "assistant"] + assistant)
            if lead.startswith(" ") or len(chunks) < 2:  # the first chunk must be what joins the pending text
                self.turn("user", user)
                self.turn("assistant", assistant)
                return
            known = (chunks[0], sum(map(ruler.count_chunk, chunks[1:-1])), chunks[-1])
            ruler.exchanges[key] = known
        first, body, last = known
        pending = self._pending + first
        self._total += (ruler.count_chunk(pending, first=self._first) if pending else 0) + body
        self._first = False
        self._pending, self._role = last, "assistant"

    def open(self, role: str, *, begun: bool = False) -> None:
        """Append the template's text that leads to the content of the next turn."""
        layout = self._ruler.layout
        try:
            if self._role is None:
                lead = layout.opening[role]
            else:
                lead = layout.begun if begun else layout.between[self._role, role]
        except KeyError:
            shown = role if self._role is None else f"{self._role} followed by {role}"
            raise RulerError(f"the chat template of {self._ruler.source} has no place for the turn {shown}") from None
        self.text(lead)
        self._role = role

    def shift(self, tokens: int) -> None:
        """Correct the count by a measured difference (rulers whose sums are estimates)."""
        self._total += tokens

    def turn(self, role: str, content: str, *, begun: bool = False) -> None:
        """Append a whole turn."""
        self.open(role, begun=begun)
        self.text(content)

    def close(self) -> None:
        """Append what ends the prompt."""
        layout = self._ruler.layout
        assert self._role is not None
        if self._role != "assistant":
            self.text(layout.closing[self._role])


def _token_text(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RulerError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RulerError(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise RulerError(f"{path} holds a {type(loaded).__name__}; a JSON object is right")
    return loaded


def _named_template(template: object, path: Path) -> str:
    if isinstance(template, list):  # several named templates: the default one is what servers use
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str) or not template.strip():
        raise RulerError(
            f"{path} has no chat template: add chat_template.jinja beside it, name one with --template, "
            "or measure on the running server with --server"
        )
    return template
