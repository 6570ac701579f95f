"""From planned questions to what a server is sent, arm by arm, and how much of it a prefix cache must hold by then.

warm       scripted history; what an earlier question of the conversation left in the cache is reused
cold       the same with a salt of its own: nothing may come from the cache
branched   the last user turn is sent in another wording first, then edited and sent as planned
free       the model's own replies stand in the history instead of the scripted ones
concat     the same facts and text in one turn (needles' twin), equally long
alone      warm, one request at a time (the others keep many in flight)
mirrored   warm, the first block once more at the end of the run, the builds in reverse order
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from longrecall.needles.render import Message, Ruler, continues, messages_for
from longrecall.needles.schema import Ask, Conversation
from longrecall.runners.schema import Arm

Messages = list[dict[str, str]]
EDIT = " Please answer in one line."
"""What the first wording of a branched question ends with; the edit takes it off again."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How this engine and model are to be asked. Without `encode` nothing about the cache can be demanded."""

    as_sent: Callable[[Messages], Messages] = lambda messages: messages
    """The messages as this engine has to be sent them."""
    encode: Callable[[Sequence[Message]], list[int]] | None = None
    """Token ids of a prompt as the server will have it."""
    encode_history: Callable[[Sequence[Message]], list[int]] | None = None
    """Token ids of the messages of a history alone, nothing opened after them."""
    encode_text: Callable[[str], list[int]] | None = None
    """Token ids of plain text."""
    twins: Mapping[str, Conversation] = field(default_factory=dict)
    """conversation_id to its concat twin, whose questions are in the same order."""
    page_tokens: int = 1
    """Tokens of a cache page: reuse is counted in whole pages."""
    _shared: dict[tuple[str, int], int] = field(default_factory=dict, repr=False)

    def messages(self, conversation: Conversation, ask: Ask, arm: Arm) -> Messages:
        """The planned prompt of a question in this arm (arm free: with the scripted history)."""
        if arm != "concat":
            return messages_for(conversation, ask)
        twin = self.twins[conversation.conversation_id]
        return messages_for(twin, twin.asks[conversation.asks.index(ask)])

    def whole_pages(self, tokens: int) -> int:
        return tokens // self.page_tokens * self.page_tokens

    def history_tokens(self, conversation: Conversation, rung: int) -> int | None:
        """Tokens of the history that all questions of a rung have in common; None where that is not known."""
        if self.encode is None or self.encode_history is None:
            return None
        key = (conversation.conversation_id, rung)
        if key not in self._shared:
            ask = min((ask for ask in conversation.asks if ask.rung == rung), key=lambda ask: ask.turn_end)
            prompt = messages_for(conversation, ask)
            history = prompt[: ask.turn_end]
            self._shared[key] = _common(self.encode_history(history), self.encode(prompt)) if history else 0
        return self._shared[key]

    def demanded(self, conversation: Conversation, rung: int, answered: set[int]) -> int | None:
        """Prompt tokens that must come from the cache once questions of the rungs in `answered` have been answered."""
        lower = [done for done in answered if done <= rung]
        if not lower:
            return None
        tokens = self.history_tokens(conversation, max(lower))
        return None if tokens is None else self.whole_pages(tokens)

    def edited(self, messages: Messages) -> tuple[Messages, int | None]:
        """The first wording of a branched question, and how many tokens it has in common with the planned one."""
        place = max(i for i, message in enumerate(messages) if message["role"] == "user")
        first = [dict(message) for message in messages]
        first[place]["content"] += EDIT
        if self.encode is None:
            return first, None
        return first, self.whole_pages(_common(self.encode(first), self.encode(messages)))


def make_prompts(ruler: Ruler, twins: Mapping[str, Conversation], *, after_prompt: bool) -> Prompts:
    """How a model of this tokenizer and template is asked; `after_prompt`: see `after_generation_prompt`."""

    def encode(messages: Sequence[Message]) -> list[int]:
        begun = continues(messages)
        return ruler.encode(messages, add_generation_prompt=not begun, continue_final_message=begun)

    return Prompts(
        as_sent=after_generation_prompt(ruler) if after_prompt else lambda messages: messages,
        encode=encode,
        encode_history=lambda messages: ruler.encode_text(ruler.render(messages)),
        encode_text=ruler.encode_text,
        twins=twins,
    )


def after_generation_prompt(ruler: Ruler) -> Callable[[Messages], Messages]:
    """What to send to a server that appends a begun answer to the generation prompt as it stands.

    SGLang puts nothing between the two; what the template puts there (a blank after "Assistant:") goes into the
    message, so that the prompt is the planned one, token for token.
    """

    def as_sent(messages: Messages) -> Messages:
        if not continues(messages):
            return messages
        whole = ruler.render(messages, continue_final_message=True)
        opened = ruler.render(messages[:-1], add_generation_prompt=True)
        if not whole.startswith(opened):
            raise ValueError("the chat template's generation prompt does not begin its assistant turn")
        return [*messages[:-1], {**messages[-1], "content": whole[len(opened) :]}]

    return as_sent


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
