"""What is seen of every server before the first question: is this the model the questions were measured for?

A context too short for the longest rung refuses every prompt there, after the shorter ones were paid for. A served
model with another tokenizer or chat template answers every planned prompt with another token count, and each reply
would be void. Seen here first, it is one message, and costs one token.
"""

import random

from longrecall.needles.render import continues
from longrecall.needles.schema import Conversation
from longrecall.runners.client import Endpoint, Question, ask, error_class
from longrecall.runners.prompts import Messages, Prompts

_MESSAGES: Messages = [
    {"role": "user", "content": "The locker code of Ada is 48213."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the locker code of Ada?"},
]
_BEGUN = {"role": "assistant", "content": "The locker code of Ada is"}


def too_short(longest_context: int | None, rung: int, max_tokens: int) -> str | None:
    """What is wrong with a server of this longest context (None: it does not say); None when the rung fits."""
    if longest_context is None or rung + max_tokens <= longest_context:
        return None
    return (
        f"its longest context is {longest_context:,} tokens, and rung {rung:,} with an answer of {max_tokens} takes"
        f" {rung + max_tokens:,}"
    )


async def problem_of(endpoint: Endpoint, prompts: Prompts, example: Conversation, model_folder: str) -> str | None:
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
        return None
    if error_class(reply.error) == "prompt-tokens":
        return (
            f"it counts {reply.prompt_tokens} tokens where the tokenizer and chat template of {model_folder} make"
            f" {planned}: another model is served than the one in that folder"
        )
    return f"it cannot be asked: {reply.error}"
