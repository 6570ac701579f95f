"""SGLang's server: its launch command, and its own report held against it.

A flag is a wish: SGLang replaces an attention backend that the hardware lacks, rounds a page size, and goes on. What
counts is `/server_info`, so every flag given is looked up there, and a campaign whose server runs something else ends
with both values named.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_SHORT_NAMES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "dp": "dp_size", "data_parallel_size": "dp_size",
    "pp": "pp_size", "pipeline_parallel_size": "pp_size", "ep": "ep_size", "expert_parallel_size": "ep_size",
    "model": "model_path", "context_len": "context_length",
}  # fmt: skip
"""Flags that SGLang reports under another key."""
_NOT_REPORTED = frozenset({"host", "port", "model_path", "json_model_override_args", "api_key", "admin_api_key"})
ALWAYS = (
    ("--enable-cache-report",),  # else a reply does not say how much of its prompt came from the cache
    ("--random-seed", "0"),  # else each start draws its own, and reports it
)
_LOG_FACTS = {
    "kv_cache_dtype": re.compile(r"KV Cache is allocated\. dtype: ([\w.]+)"),
    "attention_backend": re.compile(r"Attention backend not (?:explicitly )?specified\. Use (\S+) backend by default"),
    "radix_cache": re.compile(r"Tree cache initialized: .*?impl=(\w+)"),
    "hybrid_swa": re.compile(r"Tree cache initialized: .*?hybrid_swa=(\w+)"),
}
"""Decisions that /server_info leaves at "auto"."""


def command(folder: Path, args: tuple[str, ...], python: str) -> tuple[str, ...]:
    """Launch command with "{port}" for the port."""
    needed = tuple(part for flag in ALWAYS if flag[0] not in args for part in flag)
    return (
        python, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1", "--port", "{port}",
        *needed, *args,
    )  # fmt: skip


def flags(args: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """(key of /server_info, value) of each flag; None for a switch. The last of equal flags counts, as in argparse."""
    found: dict[str, str | None] = {}
    place = 0
    while place < len(args):
        arg = args[place]
        place += 1
        if not arg.startswith("--"):
            continue
        name, equals, value = arg[2:].partition("=")
        key = name.replace("-", "_")
        key = _SHORT_NAMES.get(key, key)
        given: str | None = value if equals else None
        values = []
        while not equals and place < len(args) and not (args[place].startswith("--") and len(args[place]) > 2):
            values.append(args[place])
            place += 1
        if values:
            given = " ".join(values)
        found.pop(key, None)
        found[key] = given
    yield from found.items()


def contradictions(args: tuple[str, ...], info: Mapping[str, object]) -> list[str]:
    """Flags whose value the server reports otherwise; a flag that it does not report is not judged."""
    found = []
    for key, wanted in flags(args):
        if key in _NOT_REPORTED or key not in info:
            continue
        told = info[key]
        if not _agrees(wanted, told):
            flag = "--" + key.replace("_", "-")
            found.append(f"{flag} {wanted if wanted is not None else ''}".rstrip() + f": the server runs {told!r}")
    return found


def _agrees(wanted: str | None, told: object) -> bool:
    if wanted is None:
        return told is True
    if wanted == "auto":
        return True
    if isinstance(told, bool):
        return wanted.lower() == str(told).lower()
    if isinstance(told, int | float):
        try:
            return float(wanted) == float(told)
        except ValueError:
            return False
    if isinstance(told, list | tuple):
        return wanted.split() == [str(item) for item in told]
    return str(told) in (wanted, wanted.replace(f"{Path.home()}/", "~/"))  # as the stored report writes paths


def told_by_log(text: str) -> dict[str, object]:
    """What SGLang decided and said in its log alone, by the key of the flag that would have said it."""
    found = {key: pattern.findall(text) for key, pattern in _LOG_FACTS.items()}
    # Several ranks say the same; more than one answer is itself worth a look.
    return {key: " / ".join(sorted(set(values))) for key, values in found.items() if values}
