"""A campaign's servers: which run at the same time, their start, and what each says of itself.

One process per build, ready when it has generated a token; what each says of itself must be the same but for the named
patch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from longrecall.results import run_folder
from longrecall.results.plan import CampaignError, Plan
from longrecall.results.schema import Campaign
from longrecall.results.watching import Watcher
from longrecall.runners.builds import BASE, PreparedBuild, changed_keys, check_builds, with_server_info, without_secrets
from longrecall.runners.processes import Server, ServerError, stop_all

STATISTICS = ("prefill_tokens", "decode_tokens", "cached_tokens", "prefill_s", "decode_s", "busy_s")


def plan_waves(
    plan: Plan, builds: Sequence[PreparedBuild], note: Callable[[str], None]
) -> list[Sequence[PreparedBuild]]:
    """The builds served at the same time: all of them where memory allows, else in groups, one after another."""
    at_once = plan.options.servers_at_once
    engine = plan.engine
    if at_once is None and engine.launches and engine.server_mb:
        import psutil

        available_mb = psutil.virtual_memory().available // 2**20
        at_once = max(1, int(available_mb - engine.shared_mb) // engine.server_mb)
        if at_once < len(builds):
            note(
                f"{available_mb:,} MB of memory are free and a server takes {engine.server_mb:,}: {at_once} of"
                f" {len(builds)} builds are served at a time, so they are not interleaved block by block"
            )
    by_gpus = engine.builds_at_once(plan.patchset)
    if by_gpus is not None:
        by_gpus *= plan.options.servers_per_gpu
    if by_gpus is not None and by_gpus < (at_once or len(builds)):
        note(f"the GPUs here serve {by_gpus} of {len(builds)} builds at a time")
        at_once = by_gpus
    at_once = at_once or len(builds)
    return [builds[start : start + at_once] for start in range(0, len(builds), at_once)]


async def start_wave(
    plan: Plan,
    wave: Sequence[PreparedBuild],
    run_dir: Path,
    campaign: Campaign,
    servers: dict[str, Server],
    infos: dict[str, dict[str, object]],
    watcher: Watcher,
) -> tuple[Campaign, dict[str, str]]:
    """Start the servers of a wave, wait for each one's first token, and compare what each says of itself.

    Returns the campaign with what they say, and the builds that did not come up, with the message; the others go on.
    Without the base there is nothing to compare with, and the campaign ends.
    """
    started = []
    for place, prepared in enumerate(wave):
        if prepared.endpoint is None:
            build_id = prepared.build.build_id
            folder = run_dir.resolve() / "builds" / build_id
            servers[build_id] = plan.engine.server(
                prepared, plan.patchset, folder, place // plan.options.servers_per_gpu
            )
            started.append(servers[build_id])
    if started:
        watcher.note(f"starting {len(started)} servers")
    failed: dict[str, str] = {}
    for server in started:
        try:
            server.start()
        except ServerError as problem:
            failed[server.name] = str(problem)
    timeout_s = plan.options.start_timeout_s or plan.engine.start_timeout_s
    waited = [server for server in started if server.name not in failed]
    for server, outcome in zip(
        waited,
        await asyncio.gather(*(item.wait_ready(timeout_s) for item in waited), return_exceptions=True),
        strict=True,
    ):
        if isinstance(outcome, ServerError):
            failed[server.name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    if BASE in failed:
        raise CampaignError(failed[BASE])
    stop_all([servers.pop(name) for name in failed])
    started = [server for server in started if server.name not in failed]
    if plan.engine.capabilities.server_info:
        for server in started:
            parts = {
                name: await server_info(server.name, url, plan.engine.info_path)
                for name, url in server.info_urls().items()
            }
            info: dict[str, object] = {"servers": parts} if "" not in parts else parts[""]
            logged = plan.engine.told_by_log(server.log_of_this_start())
            info |= {"log": logged} if logged else {}
            before = infos.get(server.name, info)
            changed = changed_keys(before, info, plan.engine)
            if changed:
                raise CampaignError(
                    f"build {server.name} is not the server this run began with: {'; '.join(changed)};"
                    " give --fresh for a new run"
                )
            infos[server.name] = info
            asked_for = launch_args(plan, server.name)
            against = [line for part in parts.values() for line in plan.engine.contradictions(asked_for, part)]
            if against:
                raise CampaignError(f"build {server.name} does not run what it was asked to run: {'; '.join(against)}")
    told = tuple(with_server_info(prepared.build, infos.get(prepared.build.build_id)) for prepared in plan.builds)
    asked = [build for build in told if not infos or build.build_id in infos]
    check_builds(asked, plan.patchset, plan.engine)
    for build in asked:
        run_folder.write_json(run_dir / "builds" / build.build_id / "manifest.json", build)
    campaign = replace(campaign, builds=told)
    run_folder.write_campaign(run_dir, campaign)
    return campaign, failed


def launch_args(plan: Plan, build_id: str) -> tuple[str, ...]:
    """The launch arguments in a build's manifest."""
    builds = {item.build.build_id: item.build for item in plan.builds}
    manifest = builds[build_id].manifest
    return manifest.args if manifest is not None else ()


def page_tokens(infos: Sequence[Mapping[str, object] | None]) -> int:
    """The largest cache page that any of these servers reports, in tokens."""
    sizes = [info.get("page_size") for info in infos if info is not None]
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=1)


async def server_info(build_id: str, url: str, path: str) -> dict[str, object]:
    """What a server says of itself."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            reply = await client.get(path)
            info = reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError) as problem:
        raise CampaignError(f"build {build_id}: {path} cannot be read: {problem!r}") from None
    if not isinstance(info, dict):
        raise CampaignError(f"build {build_id}: {path} answered {reply.status_code}: {reply.text[:200]!r}")
    return without_secrets(info)


async def server_statistics(urls: Sequence[str], path: str) -> dict[str, float]:
    """Sums over the servers of what they have done, and `inside_model_s`; one that does not say is left out."""
    total: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        for url in urls:
            try:
                told = (await client.get(url + path)).json()
            except (httpx.HTTPError, ValueError):
                continue
            for name in STATISTICS:
                if isinstance(told.get(name), int | float):
                    total[name] = total.get(name, 0.0) + told[name]
    if "prefill_s" in total and "decode_s" in total:
        total["inside_model_s"] = total["prefill_s"] + total["decode_s"]
    return total


async def served_model(build_id: str, url: str) -> tuple[str, int | None]:
    """The name of the model that a server lists first, and its longest context in tokens where it says so."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            reply = await client.get("/v1/models")
            listed = reply.json()["data"][0]
            longest = listed.get("max_model_len")
            return str(listed["id"]), longest if isinstance(longest, int) and longest > 0 else None
    except httpx.HTTPError as problem:
        raise CampaignError(f"build {build_id}: nobody answers at {url}: {problem!r}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CampaignError(
            f"build {build_id}: {url} is not an OpenAI-compatible server: /v1/models answered {reply.status_code}:"
            f" {reply.text[:120]!r}"
        ) from None
