"""Sets on disk: one Parquet row per conversation, readable by `datasets.load_dataset("parquet", data_files=…)`.

    write_parquet(conversations, "sets/demo/conversations.parquet")     # streams; atomic
    conversations = read_parquet("sets/demo/conversations.parquet")
    suite_hash(conversations)                                           # of the content, not of the file's bytes

`write_set` adds a dataset card (README.md) and set.json, so that `datasets.load_dataset("sets/demo")` works too.
The content hash is a sha256 over the conversations in a canonical form; Parquet bytes depend on the pyarrow version,
the content hash does not.
"""

import hashlib
import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from longrecall.needles.collection import no_collection
from longrecall.needles.schema import SCHEMA_VERSION, Ask, Conversation, Fact, Probe, Role, Turn
from longrecall.needles.whole_file import write_text

_TURN = pa.struct(
    [
        ("turn_index", pa.int32()),
        ("role", pa.string()),
        ("content", pa.string()),
        ("fact_ids", pa.list_(pa.string())),
    ]
)
SCHEMA = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("conversation_id", pa.string()),
        ("recipe", pa.string()),
        ("seed", pa.int64()),
        ("tokenizer_hash", pa.string()),
        ("template_hash", pa.string()),
        ("rungs", pa.list_(pa.int64())),
        ("turns", pa.list_(_TURN)),
        (
            "facts",
            pa.list_(
                pa.struct(
                    [
                        ("fact_id", pa.string()),
                        ("entity", pa.string()),
                        ("attribute", pa.string()),
                        ("value", pa.string()),
                        ("kind", pa.string()),
                        ("turn_index", pa.int32()),
                        ("supersedes", pa.string()),
                        ("aliases", pa.list_(pa.string())),
                    ]
                )
            ),
        ),
        (
            "probes",
            pa.list_(
                pa.struct(
                    [
                        ("probe_id", pa.string()),
                        ("kind", pa.string()),
                        ("question", pa.string()),
                        ("gold", pa.string()),
                        ("aliases", pa.list_(pa.string())),
                        ("live_fact", pa.string()),
                        ("distractor_values", pa.list_(pa.string())),
                        ("stale_values", pa.list_(pa.string())),
                        ("answer_prefix", pa.string()),
                        ("needs", pa.list_(pa.string())),
                    ]
                )
            ),
        ),
        (
            "asks",
            pa.list_(
                pa.struct(
                    [
                        ("rung", pa.int64()),
                        ("probe_id", pa.string()),
                        ("turn_end", pa.int32()),
                        ("tail", pa.list_(_TURN)),
                        ("prompt_tokens", pa.int64()),
                        ("fact_span", pa.list_(pa.int64())),
                        ("depth_pct", pa.float64()),
                        ("distance_tokens", pa.int64()),
                        ("distance_turns", pa.int32()),
                    ]
                )
            ),
        ),
        ("cluster_id", pa.string()),
    ]
)
_GROUP_BYTES = 8 << 20
"""A row group is closed after so much text: a streaming reader (and this writer) hold one at a time."""
_REPEATED = ["recipe", "tokenizer_hash", "template_hash", "turns.list.element.role"]
"""Columns worth a dictionary: looking for repeated sentences in the histories only takes time."""
_HASH_KEY = b"longrecall.suite_hash"

Record = TypeVar("Record", Turn, Fact, Probe, Ask)


class SetError(ValueError):
    """A set on disk is missing, broken or of another version; the message names the file."""


def _row(record: Any) -> dict[str, Any]:
    # dataclasses.asdict copies deeply and takes ten times as long on a conversation of a thousand turns
    if type(record) is Turn:
        return {
            "turn_index": record.turn_index,
            "role": record.role,
            "content": record.content,
            "fact_ids": list(record.fact_ids),
        }
    row = {}
    for name in _names(type(record)):
        value = getattr(record, name)
        if isinstance(value, tuple):
            value = [_row(item) if hasattr(item, "__dataclass_fields__") else item for item in value]
        row[name] = value
    return row


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    found = _NAMES.get(kind)
    if found is None:
        found = _NAMES[kind] = tuple(field.name for field in fields(kind))
    return found


def _version() -> str:
    try:
        return installed_version("longrecall")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unreleased"


def to_row(conversation: Conversation) -> dict[str, Any]:
    """The conversation as plain lists and dicts, as the Parquet row holds it."""
    return _row(conversation)


def from_row(row: dict[str, Any]) -> Conversation:
    """The conversation of a row (of `datasets`, pyarrow or JSON)."""

    def turns(items: Iterable[dict[str, Any]]) -> tuple[Turn, ...]:
        return tuple(
            Turn(
                turn_index=item["turn_index"],
                role=cast(Role, item["role"]),
                content=item["content"],
                fact_ids=tuple(item["fact_ids"]),
            )
            for item in items
        )

    return Conversation(
        schema_version=row["schema_version"],
        conversation_id=row["conversation_id"],
        recipe=row["recipe"],
        seed=row["seed"],
        tokenizer_hash=row["tokenizer_hash"],
        template_hash=row["template_hash"],
        rungs=tuple(row["rungs"]),
        turns=turns(row["turns"]),
        facts=tuple(Fact(**{**item, "aliases": tuple(item["aliases"])}) for item in row["facts"]),
        probes=tuple(
            Probe(
                **{
                    **item,
                    "aliases": tuple(item["aliases"]),
                    "distractor_values": tuple(item["distractor_values"]),
                    "stale_values": tuple(item["stale_values"]),
                    "needs": tuple(item["needs"]),
                }
            )
            for item in row["probes"]
        ),
        asks=tuple(
            Ask(
                **{
                    **item,
                    "tail": turns(item["tail"]),
                    "fact_span": tuple(item["fact_span"]) if item["fact_span"] is not None else None,
                }
            )
            for item in row["asks"]
        ),
        cluster_id=row["cluster_id"],
    )


def canonical_bytes(conversation: Conversation) -> bytes:
    """The bytes that the content hash covers: the history's turns as plain text, everything else as JSON."""
    return b"\x1d".join(_canonical(conversation))


def _canonical(conversation: Conversation) -> tuple[bytes, bytes]:
    # Escaping half a megabyte of text as JSON would take as long as planting it.
    turns = "\x1e".join(
        [
            f"{turn.turn_index}\x1f{turn.role}\x1f{','.join(turn.fact_ids)}\x1f{turn.content}"
            for turn in conversation.turns
        ]
    )
    rest = to_row(replace(conversation, turns=()))
    return json.dumps(rest, ensure_ascii=False, separators=(",", ":")).encode(), f"{turns}\n".encode()


def suite_hash(conversations: Iterable[Conversation]) -> str:
    """sha256 over the conversations' content, in order."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(canonical_bytes(conversation))
    return digest.hexdigest()


def _strings(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    offsets = array("i", accumulate(map(len, encoded), initial=0))
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def _lists(lengths: Iterable[int], values: pa.Array, kind: pa.DataType) -> pa.Array:
    offsets = array("i", accumulate(lengths, initial=0))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[values])


def _table(conversations: Sequence[Conversation], rests: Sequence[bytes]) -> pa.Table:
    """Rows of a group, from the JSON of all but the histories, and the histories column by column.

    No list goes through `pa.array`, whose first call imports pandas where that is installed: 0.4 CPU-s.
    """
    lines = b"\n".join(rests)
    table = pj.read_json(
        io.BytesIO(lines),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pj.ParseOptions(explicit_schema=SCHEMA),
    ).select(SCHEMA.names)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    places = array("i", [turn.turn_index for turn in turns])
    fact_ids = _strings([fact_id for turn in turns for fact_id in turn.fact_ids])
    columns = [
        pa.Array.from_buffers(pa.int32(), len(turns), [None, pa.py_buffer(places)]),
        _strings([turn.role for turn in turns]),
        _strings([turn.content for turn in turns]),
        _lists([len(turn.fact_ids) for turn in turns], fact_ids, _TURN.field("fact_ids").type),
    ]
    histories = _lists(
        [len(conversation.turns) for conversation in conversations],
        pa.StructArray.from_arrays(columns, fields=list(_TURN)),
        SCHEMA.field("turns").type,
    )
    return table.set_column(SCHEMA.get_field_index("turns"), SCHEMA.field("turns"), histories)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written."""

    path: Path
    conversations: int
    suite_hash: str


def write_parquet(conversations: Iterable[Conversation], path: str | Path) -> Written:
    """Stream conversations to a Parquet file; the file appears whole or not at all."""
    target = Path(path)
    new_folder = not target.parent.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    count = 0
    options = {"compression": "zstd", "compression_level": 1, "use_dictionary": _REPEATED, "write_statistics": False}
    try:
        with no_collection(), pq.ParquetWriter(partial, SCHEMA, **options) as writer:
            group: list[Conversation] = []
            rests: list[bytes] = []
            size = 0
            for conversation in conversations:
                rest, turns = _canonical(conversation)
                for part in (rest, b"\x1d", turns):
                    digest.update(part)
                group.append(conversation)
                rests.append(rest)
                size += len(rest) + len(turns)
                count += 1
                if size > _GROUP_BYTES:
                    writer.write_table(_table(group, rests))
                    group, rests, size = [], [], 0
            if group:
                writer.write_table(_table(group, rests))
            writer.add_key_value_metadata({_HASH_KEY: digest.hexdigest().encode()})
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
        if new_folder and not any(target.parent.iterdir()):
            target.parent.rmdir()
    return Written(path=target, conversations=count, suite_hash=digest.hexdigest())


EXAMPLE = """\
import sys

import datasets
import openai

chat, right = openai.OpenAI(base_url=sys.argv[2], api_key="none").chat.completions, []
for row in datasets.load_dataset("parquet", data_files=sys.argv[1], split="train"):
    gold = {probe["probe_id"]: probe["gold"] for probe in row["probes"]}
    for ask in (ask for ask in row["asks"] if gold[ask["probe_id"]]):  # an abstention has no value to be found
        turns = [{"role": t["role"], "content": t["content"]} for t in row["turns"][: ask["turn_end"]] + ask["tail"]]
        begun = turns[-1]["role"] == "assistant"  # the answer is begun for the model, which goes on
        extra = {"add_generation_prompt": not begun, "continue_final_message": begun}
        reply = chat.create(model=sys.argv[3], messages=turns, max_tokens=32, temperature=0, extra_body=extra)
        right.append(gold[ask["probe_id"]] in (reply.choices[0].message.content or ""))
print(f"{sum(right)} of {len(right)} prompts answered with the planted value")
"""
"""How to run a set without longrecall; also docs/examples/run_needles_set.py."""

CARD = """\
---
pretty_name: Planted-fact conversations ({recipe})
task_categories: [question-answering]
tags: [long-context, multi-turn, needle]
configs:
- config_name: default
  data_files: conversations.parquet
---

{count} multi-turn conversations with planted facts, recipe `{recipe}`, seed {seed}, made by longrecall {version}.

- Content hash (sha256): `{suite_hash}`
- Prompt lengths in tokens (template included): {rungs}
- Prompts: {asks}; tokenizer `{tokenizer_hash}`, chat template `{template_hash}`

Each row is a conversation. Every item of `asks` is one prompt of exactly `prompt_tokens` tokens: the messages
`turns[:turn_end]` followed by `tail`. When the tail ends with an assistant turn, send `continue_final_message=true` and
`add_generation_prompt=false`. `probes` holds the question's gold answer, the values that other answers would come
from, and the kind. Text is generated; it describes no real person. A server with the set's tokenizer and template
reports `usage.prompt_tokens` equal to `prompt_tokens`. To run it against any OpenAI-compatible server
(`python run.py conversations.parquet BASE_URL MODEL`):

```python
{example}```
"""


def write_set(conversations: Iterable[Conversation], folder: str | Path, *, overwrite: bool = False) -> Written:
    """A set as a folder: conversations.parquet, a dataset card and set.json. Refuses to replace a set unasked."""
    target = Path(folder)
    if (target / "conversations.parquet").exists() and not overwrite:
        raise SetError(f"{target} already holds a set; name another folder or pass --overwrite")
    seen: dict[str, Any] = {
        "asks": 0,
        "rungs": [],
        "recipe": "",
        "seed": None,
        "tokenizer_hash": "",
        "template_hash": "",
    }

    def counted() -> Iterator[Conversation]:
        for conversation in conversations:
            seen["asks"] += len(conversation.asks)
            seen["rungs"] = list(conversation.rungs)
            for key in ("recipe", "seed", "tokenizer_hash", "template_hash"):
                seen[key] = getattr(conversation, key)
            yield conversation

    written = write_parquet(counted(), target / "conversations.parquet")
    facts = {
        "schema_version": SCHEMA_VERSION,
        "suite_hash": written.suite_hash,
        "conversations": written.conversations,
        "version": _version(),
        **seen,
    }
    shown = {**facts, "count": written.conversations, "rungs": ", ".join(map(str, seen["rungs"])), "example": EXAMPLE}
    write_text(target / "README.md", CARD.format(**shown))
    write_text(target / "set.json", json.dumps(facts, indent=1) + "\n")
    return written


def set_file(path: str | Path) -> Path:
    """The Parquet file of a set named by its folder or by the file itself."""
    found = Path(path)
    return found / "conversations.parquet" if found.is_dir() else found


def iter_parquet(path: str | Path) -> Iterator[Conversation]:
    """Conversations of a set, one row group in memory at a time."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise SetError(f"there is no set at {path}") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise SetError(f"{path} is not a readable Parquet file: {error}") from error
    with file:
        if missing := [name for name in SCHEMA.names if name not in file.schema_arrow.names]:
            raise SetError(f"{path} is not a set of conversations: it has no column {missing[0]!r}")
        number = 0
        try:
            for batch in file.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    if row["schema_version"] != SCHEMA_VERSION:
                        raise SetError(
                            f"{path} has schema version {row['schema_version']}; this program reads {SCHEMA_VERSION}"
                        )
                    try:
                        conversation = from_row(row)
                    except (KeyError, TypeError) as error:
                        raise SetError(f"{path}, row {number}: not a conversation: {error}") from error
                    yield conversation
                    number += 1
        except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            raise SetError(f"{path} is damaged after row {number}: {error}") from error


def read_parquet(path: str | Path) -> list[Conversation]:
    """All conversations of a set."""
    return list(iter_parquet(path))


def stored_hash(path: str | Path) -> str | None:
    """The content hash written with the file; None for a file not written by `write_parquet`."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowInvalid, OSError) as error:
        raise SetError(f"{path} is not a readable Parquet file: {error}") from error
    found = metadata.get(_HASH_KEY)
    return found.decode() if found else None
