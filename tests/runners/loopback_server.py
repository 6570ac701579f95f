"""An OpenAI-shaped server for tests, in a process of its own: answers from the conversation it is sent, with faults.

    python tests/runners/loopback_server.py --port 8000 --faults faults.json --seen seen.jsonl --forget 0.3

It finds the planted sentences in the prompt and completes the begun answer ("The code of Ada is") from them, so that
recall is perfect unless `--forget` makes it lose a share of facts (by hash: always the same ones). prompt_tokens is
the number of words of all messages, or with `--model-folder` the exact count under its template. Every request is
written to `--seen` on arrival. `--faults` maps a request (number of arrival, hash of its text, or "*") to a fault.
"""

import argparse
import asyncio
import hashlib
import json
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

FAULTS = (
    "reset", "reset-once", "http-500", "http-503", "http-429", "http-400", "overflow-400", "overflow-413", "hang",
    "cut", "invalid-json", "not-an-object", "no-choices", "no-usage", "wrong-usage", "wrong-cached", "error-200",
    "slow",
)  # fmt: skip


class Loopback:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.arrived = 0
        self.open = 0
        self.prefixes: set[str] = set()
        self.seen = open(options.seen, "a", buffering=1) if options.seen else None
        self.faults: dict[str, str] = json.loads(Path(options.faults).read_text()) if options.faults else {}
        self.reset_done: set[str] = set()
        self.rng = random.Random(options.seed)
        self.count = self.count_words
        if options.model_folder:
            from longrecall.needles.render import Ruler

            rulers: dict[str, Ruler] = {}

            def count(messages: Any, template_args: Any = None) -> int:
                key = json.dumps(template_args, sort_keys=True)
                if key not in rulers:
                    rulers[key] = Ruler.from_folder(options.model_folder, template_args=template_args)
                return rulers[key].prompt_tokens(messages)

            self.count = count

    @staticmethod
    def count_words(messages: Any, template_args: Any = None) -> int:
        return sum(len(message["content"].split()) for message in messages)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
                length = re.search(rb"content-length: *(\d+)", head, re.I)
                body = await reader.readexactly(int(length.group(1))) if length else b""
                self.open += 1
                try:
                    if not await self.answer(method, path, json.loads(body) if body else {}, writer):
                        return
                finally:
                    self.open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Returns False when the connection is to be closed."""
        if path == "/health":
            return self.send(writer, 503 if self.options.never_ready else 200, {})
        if path == "/server_info":
            return self.send(writer, 200, {"engine": "loopback", "pid": 1, **json.loads(self.options.info)})
        if path == "/v1/models":
            card = {"id": "loopback", "object": "model", "max_model_len": self.options.max_model_len}
            return self.send(writer, 200, {"object": "list", "data": [card]})
        if path != "/v1/chat/completions":
            return self.send(writer, 404, {"error": {"message": f"no route {path}"}})
        text = "\n".join(message["content"] for message in body["messages"])
        question = body["messages"][-1]["content"]
        if question == "Hello" and self.options.no_token:
            return self.send(writer, 500, {"error": {"message": "precision is 'bf15'"}})
        if question == "Hello":
            return self.send(writer, 200, self.completion(text, body, "Hi"))
        if self.options.template_error:
            return self.send(writer, 400, {"error": {"message": "Conversation roles must alternate"}})
        if body.get("max_tokens") == 1:  # the prompt before the first question
            return self.send(writer, 200, self.completion(text, body, self.options.first_token))
        number = self.arrived
        self.arrived += 1
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if self.seen:
            line = {"number": number, "key": key, "salt": body.get("cache_salt"), "open": self.open, "text": text}
            self.seen.write(json.dumps(line) + "\n")
        fault = self.faults.get(key) or self.faults.get(str(number)) or self.faults.get("*")
        if self.options.delay:
            await asyncio.sleep(self.options.delay)
        if self.options.die_after is not None and number >= self.options.die_after:
            print("loopback: dying as told", file=sys.stderr, flush=True)
            sys.stderr.flush()
            import os

            os._exit(7)
        if fault == "reset-once" and key not in self.reset_done:
            self.reset_done.add(key)
            writer.transport.abort()
            return False
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault and fault.startswith("http-"):
            return self.send(writer, int(fault[5:]), {"error": {"message": "the server is unwell"}})
        if fault and fault.startswith("overflow-"):
            message = "This model's maximum context length is 32 tokens; the prompt has 99."
            return self.send(writer, int(fault[9:]), {"error": {"message": message}})
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.sleep(0.05)
        said = self.recall(text, question)
        if self.options.thinks:
            said = f"<think>\nThe code is not 12345.\n</think>\n{said}"
            said = said.split(body["stop"][0])[0] if body.get("stop") else said
        reply = self.completion(text, body, said)
        if fault == "no-choices":
            reply["choices"] = []
        if fault == "no-usage":
            del reply["usage"]
        if fault == "wrong-usage":
            reply["usage"]["prompt_tokens"] += 1
        if fault == "wrong-cached":
            reply["usage"]["prompt_tokens_details"] = {"cached_tokens": 10**6}
        if fault == "error-200":
            reply = {"error": {"message": "inner failure"}}
        if body.get("stream") and fault not in ("invalid-json", "not-an-object", "cut", "error-200"):
            return self.send_stream(writer, reply)
        data = json.dumps(reply).encode()
        if fault == "invalid-json":
            data = data[: len(data) // 2]
        if fault == "not-an-object":
            data = b"[1, 2]"
        kind = "text/event-stream" if body.get("stream") else "application/json"
        if body.get("stream"):
            data = b"data: " + data + b"\n\n"
        if fault == "cut":
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: 9999\r\n\r\n" % kind.encode() + data[:20]
            )
            await writer.drain()
            return False
        writer.write(self.head(200, kind, len(data)) + data)
        return True

    def recall(self, text: str, question: str) -> str:
        subject = question.strip()
        digest = int(hashlib.sha256(subject.encode()).hexdigest(), 16) % 1000 / 1000
        name = re.search(r"of (\w+) is$", subject)
        found = None
        for sentence in re.split(r"[.?!\n]", text[: text.rfind(question)]):
            value = re.search(r"\b\d{5}\b", sentence)
            if name and value and re.search(rf"\b{name.group(1)}\b", sentence):
                found = value.group()
        if digest < self.options.forget or not found:
            return " not something I know."
        return f" {found}."

    def completion(self, text: str, body: dict[str, Any], reply: str) -> dict[str, Any]:
        words = self.count(body["messages"], body.get("chat_template_kwargs")) + self.options.extra_tokens
        prefix = "\n".join(message["content"] for message in body["messages"][:-2])
        cached = len(prefix.split()) if prefix in self.prefixes and "cache_salt" not in body else 0
        self.prefixes.add(prefix)
        content = [{"token": token, "logprob": -0.1} for token in reply.split()]
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "loopback",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": reply},
                    "finish_reason": "stop",
                    "logprobs": {"content": content} if body.get("logprobs") else None,
                }
            ],
            "usage": {
                "prompt_tokens": words,
                "completion_tokens": len(content),
                "total_tokens": words + len(content),
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }

    def send_stream(self, writer: asyncio.StreamWriter, reply: dict[str, Any]) -> bool:
        choices = reply["choices"]
        chunks: list[dict[str, Any]] = []
        for choice in choices:
            delta = {"content": choice["message"]["content"]}
            first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
            chunks.append({"choices": [first]})
            chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": reply.get("usage")})
        data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
        writer.write(self.head(200, "text/event-stream", len(data)) + data)
        return True

    def head(self, status: int, kind: str, length: int) -> bytes:
        return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()

    def send(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> bool:
        data = json.dumps(body).encode()
        writer.write(self.head(status, "application/json", len(data)) + data)
        return True


async def main(options: argparse.Namespace) -> None:
    if options.exit_at_start is not None:
        print("loopback: cannot load the weights: file is cut", file=sys.stderr, flush=True)
        sys.exit(options.exit_at_start)
    if options.out_of_memory:
        print("loopback: allocating the KV cache", file=sys.stderr, flush=True)
        signal.raise_signal(signal.SIGKILL)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.orphan:
        # A grandchild in a session of its own, as engines with worker processes leave behind.
        import subprocess

        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(options.orphan).write_text(str(child.pid))
    loopback = Loopback(options)
    server = await asyncio.start_server(loopback.serve, "127.0.0.1", options.port)
    await server.serve_forever()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--faults")
    made.add_argument("--model-folder")
    made.add_argument("--seen")
    made.add_argument("--info", default="{}")
    made.add_argument("--forget", type=float, default=0.0)
    made.add_argument("--delay", type=float, default=0.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--die-after", type=int)
    made.add_argument("--exit-at-start", type=int)
    made.add_argument("--ignore-sigterm", action="store_true")
    made.add_argument("--never-ready", action="store_true")
    made.add_argument("--no-token", action="store_true")
    made.add_argument("--orphan")
    made.add_argument("--out-of-memory", action="store_true")
    made.add_argument("--extra-tokens", type=int, default=0)
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--first-token", default=" 1")
    made.add_argument("--thinks", action="store_true")
    made.add_argument("--template-error", action="store_true")
    return made


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
