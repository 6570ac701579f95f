"""Free-running histories: the model's own replies in place of the scripted ones, kept in the run folder.

User turns stay as planned, and so does an assistant turn that states a fact, which would else not be in the
conversation at all. Every other assistant turn is what this build replied to the conversation so far, at most as many
tokens long as the scripted one, so that a prompt does not outgrow its rung by much. Each reply is on the disk before
it is used (`histories.jsonl`), so that a resumed run goes on with the same history.
"""

import asyncio
import json
import random
from pathlib import Path

from longrecall.needles.render import as_messages
from longrecall.needles.schema import Conversation
from longrecall.runners.client import Endpoint, Question, ask
from longrecall.runners.journal import AppendFile, JournalError
from longrecall.runners.prompts import Messages, Prompts

HISTORIES = "histories.jsonl"
_TOKENS_PER_WORD = 1.5
"""Where nothing counts tokens."""


class HistoryBroken(RuntimeError):
    """A turn of the history could not be generated; the text is an error of class `history`."""

    def __init__(self, turn: str, error: str) -> None:
        super().__init__(f"history: {turn}: {error}")
        self.error = error
        """What the reply ended in."""


class FreeHistories:
    """The generated turns of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._file = AppendFile(run_dir / HISTORIES)
        self._writing = asyncio.Lock()
        self._replies: dict[tuple[str, str, int, int], str] = {}
        for number, line in self._file.lines():
            try:
                build_id, conversation_id, repeat, turn_index, text = json.loads(line)
                self._replies[build_id, conversation_id, repeat, turn_index] = text
            except (ValueError, TypeError) as problem:
                raise JournalError(f"{self._file.path} line {number}: not a turn of a history: {problem!r}") from None

    async def grown(
        self, endpoint: Endpoint, prompts: Prompts, conversation: Conversation, repeat: int, turn_end: int
    ) -> Messages:
        """The first `turn_end` messages of this build's own history of a conversation; generates what is missing.

        Raises:
            HistoryBroken: a reply did not come.
        """
        messages = as_messages(conversation.turns[:turn_end])
        for place, turn in enumerate(conversation.turns[:turn_end]):
            if turn.role != "assistant" or turn.fact_ids or not place:
                continue
            key = (endpoint.build_id, conversation.conversation_id, repeat, turn.turn_index)
            if key not in self._replies:
                self._replies[key] = await self._generated(endpoint, prompts, messages[:place], turn.content, key)
                line = json.dumps([*key, self._replies[key]], separators=(",", ":"))
                async with self._writing:
                    await asyncio.to_thread(self._file.append, line.encode() + b"\n")
            messages[place]["content"] = self._replies[key]
        return messages

    @staticmethod
    async def _generated(
        endpoint: Endpoint, prompts: Prompts, before: Messages, scripted: str, key: tuple[str, str, int, int]
    ) -> str:
        tokens = int(len(scripted.split()) * _TOKENS_PER_WORD)
        if prompts.encode_text is not None:
            tokens = len(prompts.encode_text(scripted))
        question = Question(
            messages=before, prompt_tokens=None, continue_final=False, max_tokens=max(tokens, 1), stop=("\n",),
            logprobs=False,
        )  # fmt: skip
        reply = await ask(endpoint, question, random.Random(f"free/{key}"))
        if reply.error is not None:
            raise HistoryBroken(f"turn {key[-1]} of {key[1]}", reply.error)
        return (reply.text or "").strip()

    def close(self) -> None:
        self._file.close()
