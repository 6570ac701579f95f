"""What is seen of every server before the first question: is this the model the questions were measured for?

A context too short for the longest rung refuses every prompt there, after the shorter ones were paid for. A served
model with another tokenizer or chat template answers every planned prompt with another token count, and each reply
would be void. Seen here first, it is one message, and costs one token.
"""

import random
from collections.abc import Callable, Sequence

from longrecall.needles.render import continues
from longrecall.needles.schema import Conversation
from longrecall.runners.client import Endpoint, Question, ask, error_class
from longrecall.runners.prompts import Messages, Prompts

_MESSAGES: Messages = [
    {"role": "user", "content": "The locker code of Ada is 48213."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the locker code of Ada?"},
]
_THINKING = ("<think", "<reasoning", "<thought")
_LEAST_REPLY = 16
_AFTER_ANSWER, _AROUND_ANSWER, _WHOLE = 8, 32, 256
"""Tokens beside the answer: behind it where the reply was begun, around it in a sentence of the model's own, and in a
reply that ends by itself."""
_BEGUN = {"role": "assistant", "content": "The locker code of Ada is"}


def reply_tokens(
    conversations: Sequence[Conversation],
    encode: Callable[[str], list[int]],
    given: int | None,
    *,
    whole_replies: bool = False,
) -> int:
    """The longest reply to ask for: as given, else enough for the longest answer planted.

    Raises ValueError when what is given cuts that answer off: every such reply would be void.
    """
    probes = [probe for conversation in conversations for probe in conversation.probes if probe.gold]
    longest = max((len(encode(f" {gold}")) for gold in {probe.gold for probe in probes}), default=0)
    if given is None:
        begun = all(probe.answer_prefix for probe in probes)
        return max(_LEAST_REPLY, longest + (_WHOLE if whole_replies else _AFTER_ANSWER if begun else _AROUND_ANSWER))
    if given < longest:
        raise ValueError(f"--max-tokens {given} cuts off answers: the longest one planted takes {longest} tokens")
    return given


def too_short(longest_context: int | None, rung: int, max_tokens: int) -> str | None:
    """What is wrong with a server of this longest context (None: it does not say); None when the rung fits."""
    if longest_context is None or rung + max_tokens <= longest_context:
        return None
    return (
        f"its longest context is {longest_context:,} tokens, and rung {rung:,} with an answer of {max_tokens} takes"
        f" {rung + max_tokens:,}"
    )


async def problem_of(
    endpoint: Endpoint, prompts: Prompts, example: Conversation, model_folder: str, *, whole_replies: bool
) -> str | None:
    """What is wrong with a server that is about to be asked; None when it can be asked.

    The prompt has the form of the conversation's questions, and shares no content with them.
    """
    messages = list(_MESSAGES)
    if continues(prompts.messages(example, example.asks[0], "warm")):
        messages.append(_BEGUN)
    planned = len(prompts.encode(messages)) if prompts.encode is not None else None
    question = Question(
        messages=prompts.as_sent(messages), prompt_tokens=planned, continue_final=continues(messages), max_tokens=1,
        stop=(),
    )  # fmt: skip
    reply = await ask(endpoint, question, random.Random(0))
    if reply.error is None:
        if (reply.text or "").lstrip().startswith(_THINKING) and not whole_replies:
            return (
                "it begins to think instead of answering, and a reply ends at its first line: turn thinking off, for"
                """ example with --template-args '{"enable_thinking": false}', or let it think with --whole-replies"""
                " --max-tokens 4096"
            )
        return None
    if error_class(reply.error) == "prompt-tokens":
        return (
            f"it counts {reply.prompt_tokens} tokens where the tokenizer and chat template of {model_folder} make"
            f" {planned}: another model is served than the one in that folder"
        )
    return f"it cannot be asked: {reply.error}"
