"""What another interpreter says of itself: a program run in it, whose answer is one marked line of JSON.

Interpreters talk: hooks of an environment print when they are loaded and when they end, wrappers before either.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARK = "longrecall asked: "
# Before Python 3.11 nothing else keeps the working folder from being the first place to import from.
_PROLOGUE = f"""
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
def answer(value):
    import json
    print("\\n{_MARK}" + json.dumps(value), flush=True)
"""


class AskError(ValueError):
    """An interpreter that does not answer; the message says why, with the end of what it said instead."""


def ask_python(
    python: str, program: str, args: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: Path | None = None
) -> Any:
    """What `program`, run by `python` with `args`, gives to `answer(…)`."""
    try:
        done = subprocess.run(
            [python, "-c", _PROLOGUE + program, *args], env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AskError(f"no answer within {timeout_s:g} s") from None
    except OSError as problem:
        raise AskError(str(problem)) from None
    said = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if said and not done.returncode:
        return json.loads(said[-1])
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
    tail = "".join("\n    " + line for line in lines)
    raise AskError(f"it ended with code {done.returncode} and gave no answer{tail}")
