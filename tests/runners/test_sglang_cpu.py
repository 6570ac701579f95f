"""SGLang itself on the CPU, as `make sglang-cpu` makes it: a short campaign, then single servers looked at closely.

In this order, because the single server stays up until its last test and takes four gigabytes.
"""

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, messages_for
from longrecall.results.serving import server_info
from longrecall.runners.builds import ModelFolder, PreparedBuild, changed_keys, prepare_builds
from longrecall.runners.client import Question, ask, connect
from longrecall.runners.engines import ENGINES, ROOT
from longrecall.runners.gold import GoldScorer
from longrecall.runners.inside import Shape, look_inside, summarise
from longrecall.runners.patchset import load_patchset
from longrecall.runners.processes import HeldPort, Server
from longrecall.runners.prompts import after_generation_prompt, make_prompts
from longrecall.runners.schema import Deployment, Response
from longrecall.runners.sglang_install import is_complete
from longrecall.runners.sglang_launch import plan_build
from longrecall.runners.sglang_model import sglang_folder

PATCHSET = ROOT / "patchsets" / "sglang-cpu.toml"
RECIPE = ROOT / "patchsets" / "recipes" / "stated-once.toml"
ENGINE = ENGINES["sglang"]
# `make served` makes it: that it is missing is a failure there, and skipped tests elsewhere.
pytestmark = pytest.mark.skipif(
    not is_complete(ROOT / ".venv-sglang") and os.environ.get("LONGRECALL_SERVED") != "1",
    reason="no .venv-sglang of this version: run `make sglang-cpu`",
)


def made(folder: Path) -> dict[str, PreparedBuild]:
    model = ModelFolder(path=folder, weights_hash=None, tokenizer_hash=None, template_hash=None)
    threads = max(1, (os.cpu_count() or 2) // 2)
    prepared = prepare_builds(load_patchset(PATCHSET), ENGINE, model, threads=threads)
    return {item.build.build_id: item for item in prepared}


def test_the_shipped_diffs_apply_to_the_installed_sglang(tmp_path: Path) -> None:
    builds = made(tmp_path)
    hashes = {item.build.manifest.tree_hash for item in builds.values() if item.build.manifest}
    assert set(builds) == {"base", "base-again", "keys-3bit", "ffn-scaled-twice", "noop"} and len(hashes) == 4
    packages = builds["base"].build.manifest.packages if builds["base"].build.manifest else {}
    assert packages["sglang"] == "0.5.23" and packages["sgl_kernel"].endswith("+longrecall")


READ_COMMANDS = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang_router.launch_router import parse_router_args
for command in json.load(sys.stdin):
    module, given = command[2], command[3:]
    if module == "sglang.launch_server":
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(given)
        print(args.disaggregation_mode, args.disaggregation_transfer_backend, args.disaggregation_bootstrap_port)
    else:
        args = parse_router_args(given)
        print(args.prefill_urls, args.decode_urls, args.worker_urls, args.policy, args.disable_retries)
"""


@pytest.mark.slow
def test_sglang_and_its_router_read_the_planned_commands_as_they_are_meant(tmp_path: Path) -> None:
    build = made(sglang_folder())["base"]

    def read(deployment: Deployment) -> list[str]:
        plan = plan_build(build, deployment, iter(range(31_000, 31_020)))
        commands = json.dumps([process.command for process in plan.processes])
        python = [build.command[0], "-c", READ_COMMANDS]
        done = subprocess.run(python, input=commands, env=build.env, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    assert read(Deployment(kind="pd", prefill=1, decode=1, transfer_backend="nixl")) == [
        "prefill nixl 31002",
        "decode nixl 8998",
        "[('http://127.0.0.1:31000', 31002)] ['http://127.0.0.1:31003'] [] cache_aware True",
    ]
    *_, router = read(Deployment(kind="replicas", replicas=2, policy="round_robin"))
    assert router == "[] [] ['http://127.0.0.1:31000', 'http://127.0.0.1:31002'] round_robin True"


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_a_short_campaign_convicts_the_lossy_diffs_and_leaves_nothing(tmp_path: Path, third_party: ModuleType) -> None:
    done = third_party.campaign(
        PATCHSET, tmp_path / "runs", 1800.0, "--recipe", str(RECIPE), "--rungs", "1024", "--conversations", "8",
        "--max-tokens", "8", "--servers-at-once", "3",  # five take twenty gigabytes
    )  # fmt: skip
    assert third_party.working_in(tmp_path) == []
    assert done.verdicts["keys-3bit"] == "culprit" and done.verdicts["ffn-scaled-twice"] == "culprit", done.said
    assert done.verdicts["noop"] != "culprit", done.said
    assert all(control["passed"] for control in done.report["controls"].values()), done.said
    assert [replay for replay in done.replays if replay["response"].get("error")] == []
    # All but the first probe of a conversation find its history in the cache.
    wanted = [replay["response"] for replay in done.replays if "cached_at_least" in replay["response"]]
    assert len(wanted) > 0.8 * len(done.replays)
    assert all(response["cached_tokens"] >= response["cached_at_least"] for response in wanted)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_replicas_behind_the_router_serve_one_build(tmp_path: Path, third_party: ModuleType) -> None:
    build = made(sglang_folder())["base"]
    patchset = replace(load_patchset(PATCHSET), deployment=Deployment(kind="replicas", policy="round_robin"))
    group = ENGINE.server(build, patchset, tmp_path, 0)
    question = Question(
        messages=[{"role": "user", "content": "Hello"}], prompt_tokens=None, continue_final=False, max_tokens=2
    )

    async def use() -> list[Response]:
        await group.wait_ready(900.0)
        async with connect("base", group.url, model=str(sglang_folder())) as endpoint:
            return [await ask(endpoint, question, random.Random(0)) for _ in range(4)]

    try:
        group.start()
        replies = asyncio.run(use())
        infos = [asyncio.run(server_info(name, url, "/server_info")) for name, url in group.info_urls().items()]
    finally:
        group.stop()
    assert [reply.error for reply in replies] == [None] * 4 and len({reply.text for reply in replies}) == 1
    assert len(infos) == 2 and changed_keys(infos[0], infos[1], ENGINE) == []
    assert third_party.working_in(tmp_path) == []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, third_party: ModuleType) -> Iterator[tuple[Server, PreparedBuild]]:
    build = made(sglang_folder())["base"]
    folder = tmp_path_factory.mktemp("base")
    server = Server("base", build.command, build.env, folder, HeldPort())
    server.start()
    try:
        asyncio.run(server.wait_ready(600.0))
        # launcher, scheduler, detokenizer, and what watches them
        assert len(third_party.working_in(folder)) >= 4
        yield server, build
    finally:
        server.stop()
    assert third_party.working_in(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_server_runs_what_it_was_asked_to_run(base: tuple[Server, PreparedBuild]) -> None:
    server, build = base
    info = asyncio.run(server_info("base", server.url, "/server_info"))
    assert build.build.manifest is not None
    assert ENGINE.contradictions(build.build.manifest.args, info) == []
    assert (info["version"], info["attention_backend"], info["page_size"]) == ("0.5.23", "torch_native", 1)
    assert ENGINE.told_by_log(server.log_of_this_start())["kv_cache_dtype"] == "torch.bfloat16"
    asked_otherwise = (*build.build.manifest.args, "--attention-backend", "triton")
    assert ENGINE.contradictions(asked_otherwise, info) == [
        "--attention-backend triton: the server runs 'torch_native'"
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_prompt_is_the_planned_one_and_the_cache_says_so(base: tuple[Server, PreparedBuild]) -> None:
    server, _ = base
    ruler = Ruler.from_folder(sglang_folder())
    (conversation,) = make_conversations(recipe("reference"), ruler=ruler, rungs=(512, 640), count=1, seed=3)
    asked = conversation.asks[0]
    as_sent = after_generation_prompt(ruler)

    async def replies() -> list[Response]:
        found = []
        async with connect("base", server.url, model="x", begun_after_generation_prompt=True) as endpoint:
            for salt, limit in ((None, None), (None, None), ("alone", 0)):
                question = Question(
                    messages=as_sent(messages_for(conversation, asked)), prompt_tokens=asked.prompt_tokens,
                    continue_final=True, cache_salt=salt, cached_at_most=limit,
                )  # fmt: skip
                found.append(await ask(endpoint, question, random.Random(0)))
            long = Question(
                messages=[{"role": "user", "content": "word " * 6000}], prompt_tokens=None, continue_final=False
            )
            found.append(await ask(endpoint, long, random.Random(0)))
        return found

    first, again, cold, overlong = asyncio.run(replies())
    assert [reply.error for reply in (first, again, cold)] == [None, None, None]
    assert first.prompt_tokens == asked.prompt_tokens and again.cached_tokens == asked.prompt_tokens - 1
    assert cold.cached_tokens == 0 and cold.text == first.text
    assert overlong.error is not None and overlong.error.startswith("overflow:")
    # The same tokens by number find the whole prompt in the cache: chat messages became exactly the planned prompt.
    messages = [
        {"role": turn.role, "content": turn.content} for turn in (*conversation.turns[: asked.turn_end], *asked.tail)
    ]
    ids = ruler.encode(messages, continue_final_message=True)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    told = httpx.post(f"{server.url}/generate", json=body, timeout=120, trust_env=False).json()["meta_info"]
    assert told["prompt_tokens"] == len(ids) == asked.prompt_tokens and told["cached_tokens"] == len(ids) - 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_right_answers_are_scored_and_decode_agrees_with_prefill(
    base: tuple[Server, PreparedBuild], tmp_path: Path
) -> None:
    server, _ = base
    ruler = Ruler.from_folder(sglang_folder())
    (conversation,) = make_conversations(recipe("reference"), ruler=ruler, rungs=(512, 640), count=1, seed=3)
    prompts = make_prompts(ruler, {}, after_prompt=True)
    assert prompts.encode is not None
    scorer = GoldScorer(route="generate", encode=prompts.encode)
    asked = conversation.asks[0]
    probe = next(probe for probe in conversation.probes if probe.probe_id == asked.probe_id)

    async def use() -> tuple[Response, str | None]:
        async with connect("base", server.url, model="x") as endpoint:
            scored = await scorer.scored(endpoint, Response(), messages_for(conversation, asked), probe, None)
            shape = Shape(index_topk=None, experts_per_token=None, onset=2**31)
            return scored, await look_inside(endpoint, prompts, [conversation], 1, tmp_path, shape, 8)

    scored, wrong = asyncio.run(use())
    assert scored.gold_logprobs is not None and not scorer.problems and wrong is None
    assert all(-40 < value <= 0 for value in scored.gold_logprobs)
    said = summarise(tmp_path, ["base"], "base", "base-again", None)["builds"]["base"]
    # Measured on this model: bf16 rounding, decode against prefill of the same tokens.
    assert sorted(said) == ["512", "640"] and all(rung["prefill_decode_nats"][0] < 0.02 for rung in said.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_arm_is_answered_and_gets_from_the_cache_what_it_wants(
    base: tuple[Server, PreparedBuild], tmp_path: Path, third_party: ModuleType
) -> None:
    arms = ("warm", "cold", "branched", "free", "concat", "alone", "mirrored")
    third_party.in_every_arm(base[0].url, ENGINE, sglang_folder(), tmp_path, arms)
