"""A campaign: builds are made and served, every planned question is asked of each, and the replies are judged.

plan.py       patchset, model folder, conversations, builds: everything that is decided before the first request
opening.py    results/runs/<UTC time>-<patchset>-<key>: the key is a hash of the plan, so that the same command finds
              its unfinished run and goes on with it
serving.py    one process per build; what each says of itself must be the same but for the named patch
here          runners/replay.py asks, with the journal on the disk before and after every request
report.py     judges, from the run folder alone
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from longrecall.needles.dataset import read_parquet
from longrecall.needles.schema import Conversation
from longrecall.results import run_folder
from longrecall.results.opening import check_writable, open_run
from longrecall.results.plan import CampaignError, Options, Plan, make_plan
from longrecall.results.preflight import problem_of, too_short
from longrecall.results.report import write_reports
from longrecall.results.schema import Campaign, Report
from longrecall.results.serving import launch_args, page_tokens, plan_waves, served_model, server_statistics, start_wave
from longrecall.results.watching import Grades, Stages, Watcher
from longrecall.runners import inside
from longrecall.runners.builds import BASE, BASE_AGAIN, PreparedBuild
from longrecall.runners.client import Endpoint, connect
from longrecall.runners.gold import GoldScorer
from longrecall.runners.inside import Shape, look_inside
from longrecall.runners.journal import Journal, JournalError
from longrecall.runners.processes import Server, ServerError, log_tail, stop_all
from longrecall.runners.prompts import Prompts
from longrecall.runners.replay import BuildGone, ReplayPlan, replay, unanswered

STOP = ("\n",)
"""Base models go on with the next line of the transcript."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished (or broken off) campaign."""

    run_dir: Path
    report: Report
    gone: Mapping[str, str]
    """Builds whose server ended, with the message."""


def run_campaign(options: Options, watcher: Watcher) -> Outcome:
    """Plan, serve, ask, judge.

    Raises:
        ValueError: something asked for cannot be used.
        RuntimeError: a server, the journal or the disk failed; what was answered is kept and the same command goes on.
    """
    check_writable(options.run_dir or options.runs_dir / "run")
    stages = Stages()
    plan = make_plan(options, stages, watcher.note)
    run_dir, campaign = open_run(plan, watcher.note)
    if not any(build.role == "positive-control" for build in campaign.builds):
        watcher.note(
            f'{plan.patchset.path} has no patch with role = "positive-control": without a build that is known to lose'
            " recall nothing is exonerated"
        )
    try:
        gone = asyncio.run(_serve_and_ask(plan, run_dir, campaign, stages, watcher))
    finally:
        _write_timing(run_dir, stages)
    if options.inside:
        _write_inside(plan, run_dir, run_folder.load_campaign(run_dir))
    watcher.note("judging and writing the reports")
    report = write_reports(run_dir)
    served_here = plan.engine.name == "reference" and options.model_folder is None
    if options.in_process or (options.in_process is None and served_here and not report.partial):
        from longrecall.results.in_process import explain_losses

        with stages.stage("in_process_s"):
            found = explain_losses(run_dir, plan.model, watcher.note)
        if found:
            run_folder.write_json(
                run_dir / run_folder.TIMING,
                run_folder.load_timing(run_dir) | {"in_process_s": round(stages.seconds["in_process_s"], 3)},
            )
            report = write_reports(run_dir)
    return Outcome(run_dir=run_dir, report=report, gone=gone)


def _write_inside(plan: Plan, run_dir: Path, campaign: Campaign) -> None:
    """inside.json and inside-evidence.json, from the arrays in the run folder."""
    names = [build.build_id for build in campaign.builds]
    summary = inside.summarise(run_dir, names, BASE, BASE_AGAIN, campaign.onset_tokens)
    run_folder.write_json(run_dir / inside.SUMMARY, summary)
    info = campaign.builds[0].manifest.server_info if campaign.builds[0].manifest else None
    shape = Shape.of(plan.model.path, info, campaign.onset_tokens)
    run_folder.write_json(run_dir / inside.EVIDENCE, inside.observations(run_dir, summary, shape))


def _write_timing(run_dir: Path, stages: Stages) -> None:
    path = run_dir / run_folder.TIMING
    before = run_folder.load_timing(run_dir)
    # A run that was broken off adds up: its stages were paid for too.
    total = {name: round(before.get(name, 0.0) + value, 3) for name, value in stages.seconds.items()}
    if "first_conviction_s" in before:
        total["first_conviction_s"] = before["first_conviction_s"]
    total["wall_s"] = round(before.get("wall_s", 0.0) + stages.elapsed(), 3)
    run_folder.write_json(path, before | total)


async def _serve_and_ask(
    plan: Plan, run_dir: Path, campaign: Campaign, stages: Stages, watcher: Watcher
) -> dict[str, str]:
    """Ask what the journal lacks; servers are up only while they are needed, and never left behind."""
    journal = Journal(run_dir)
    asking = _Asking(plan=plan, run_dir=run_dir, campaign=campaign, journal=journal, stages=stages, watcher=watcher)
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    interrupted: list[int] = []

    def interrupt(number: int) -> None:
        interrupted.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread (a test)
            loop.add_signal_handler(number, interrupt, number)
    try:
        await asking.ask_all()
        return asking.gone
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise CampaignError(
            f"interrupted by {signal.Signals(interrupted[0]).name} with {len(journal.answered)} answers kept in"
            f" {run_dir}; the same command goes on from there"
        ) from None
    finally:
        watcher.end()
        with stages.stage("stop_s"):
            stop_all(list(asking.servers.values()))
        journal.close()


@dataclass(kw_only=True)
class _Asking:
    """The questions of a plan, asked wave by wave of the servers that are up."""

    plan: Plan
    run_dir: Path
    campaign: Campaign
    journal: Journal
    stages: Stages
    watcher: Watcher
    servers: dict[str, Server] = field(default_factory=dict)
    infos: dict[str, dict[str, object]] = field(default_factory=dict)
    """What each server said of itself, in this process or an earlier one."""
    gone: dict[str, str] = field(default_factory=dict)
    """Builds that are not asked to the end, with the message."""

    async def ask_all(self) -> None:
        """Ask what the journal lacks."""
        campaign, watcher, answered = self.campaign, self.watcher, self.journal.answered
        replay_plan = self._replay_plan()
        planned = replay_plan.n_planned
        grades = Grades(campaign, list(replay_plan.conversations.values()), watcher, self.stages)
        watcher.begin(campaign, planned, planned // len(campaign.builds))
        grades.stored(run_folder.load_replays(self.run_dir))
        if len(answered) >= planned:
            watcher.note("every planned question is answered already; nothing is asked")
            return
        left = [item for item in self.plan.builds if unanswered(replay_plan, item.build.build_id, answered)]
        if campaign.stop_early:
            left = [item for item in left if not grades.early.finished(item.build.build_id)]
            if not left:
                watcher.note("every patch is decided already; nothing is asked")
                return
        waves = plan_waves(self.plan, left, watcher.note)
        self.infos = {
            build.build_id: build.manifest.server_info
            for build in campaign.builds
            if build.manifest is not None and build.manifest.server_info is not None
        }
        for number, wave in enumerate(waves):
            last = number == len(waves) - 1
            await self._ask_wave(wave, replay_plan, grades, keep_servers=self.plan.options.keep_servers and last)
            if not last:
                with self.stages.stage("stop_s"):
                    names = [prepared.build.build_id for prepared in wave]
                    stop_all([self.servers.pop(name) for name in names if name in self.servers])

    def _replay_plan(self) -> ReplayPlan:
        """Raises CampaignError when the run folder does not fit together."""
        campaign, engine = self.campaign, self.plan.engine
        conversations = {item.conversation_id: item for item in read_parquet(self.run_dir / run_folder.CONVERSATIONS)}
        unknown = set(campaign.conversation_order) ^ conversations.keys()
        if unknown:
            raise CampaignError(
                f"{self.run_dir}: {min(unknown)} stands in only one of {run_folder.CAMPAIGN} and"
                f" {run_folder.CONVERSATIONS}; give --fresh for a new run"
            )
        made = ReplayPlan(
            run_id=campaign.run_id,
            build_ids=tuple(build.build_id for build in campaign.builds),
            conversations=conversations,
            conversation_order=campaign.conversation_order,
            block_size=campaign.block_size,
            arms=campaign.arms,
            repeats=campaign.repeats,
            max_tokens=campaign.max_tokens,
            stop=() if campaign.whole_replies else STOP,
            seed=campaign.seed,
            first=tuple(build.build_id for build in campaign.builds if build.role in ("base", "positive-control")),
            conversations_at_once=engine.ladders_at_once or campaign.block_size,
            whole_ladder=engine.shares_prefill,
            in_flight=campaign.concurrency,
        )
        if self.journal.in_flight:
            self.watcher.note(
                f"{len(self.journal.in_flight)} requests were in flight when the run was broken off; their answers are"
                " lost, and they are asked again"
            )
        strange = self.journal.answered - {key for name in made.build_ids for key in made.keys(name)}
        if strange:
            raise CampaignError(
                f"{self.run_dir / run_folder.REPLAYS}: {'/'.join(map(str, min(strange, key=str)))} was never planned by"
                f" {run_folder.CAMPAIGN}; give --fresh for a new run"
            )
        return made

    async def _ask_wave(
        self, wave: Sequence[PreparedBuild], replay_plan: ReplayPlan, grades: Grades, *, keep_servers: bool
    ) -> None:
        """Serve some of the builds and ask them all that is left."""
        gold = None
        if self.campaign.gold_logprobs and self.plan.engine.gold_route and self.plan.prompts.encode is not None:
            gold = GoldScorer(route=self.plan.engine.gold_route, encode=self.plan.prompts.encode)
        async with AsyncExitStack() as stack:
            with self.stages.stage("start_s"):
                self.campaign, failed = await start_wave(
                    self.plan, wave, self.run_dir, self.campaign, self.servers, self.infos, self.watcher
                )
            endpoints: dict[str, Endpoint] = {}
            longest: dict[str, int | None] = {}
            for prepared in wave:
                build_id = prepared.build.build_id
                if build_id not in failed:
                    url = self.servers[build_id].url if build_id in self.servers else prepared.endpoint
                    assert url is not None
                    model, longest[build_id] = await served_model(build_id, url)
                    endpoints[build_id] = await stack.enter_async_context(self._connect(build_id, url, model))
            prompts = replace(self.plan.prompts, page_tokens=self._page_tokens(wave))
            for build_id, endpoint in endpoints.items():
                wrong = too_short(longest[build_id], self.campaign.rungs[-1], self.campaign.max_tokens)
                wrong = wrong or await problem_of(
                    endpoint, prompts, self.plan.conversations[0], str(self.plan.model.path),
                    whole_replies=self.campaign.whole_replies,
                )  # fmt: skip
                if wrong is not None:
                    log = self.servers[build_id].log if build_id in self.servers else None
                    tail = f"; its log ends:\n{log_tail(log)}" if log is not None else ""
                    failed[build_id] = f"build {build_id} at {endpoint.root}: {wrong}{tail}"
            _without(failed, self.watcher)
            self.gone |= failed
            ids = [name for name in endpoints if name not in failed]
            with self.stages.stage("replay_s"):
                try:
                    result = await replay(
                        replay_plan, endpoints, self.journal, parallel=self.plan.parallel, prompts=prompts, gold=gold,
                        check_alive=self._check_alive, on_reply=grades, only=ids,
                        finished=grades.early.finished if self.campaign.stop_early else lambda build_id: False,
                    )  # fmt: skip
                except* JournalError as problems:
                    raise CampaignError(str(_first(problems))) from None
            self.gone |= result.gone
            for said, times in (gold.problems if gold is not None else {}).items():
                self.watcher.note(f"{times} right answers are without log-probabilities: {said}")
            if self.plan.options.inside:
                conversations = list(replay_plan.conversations.values())
                whole = {name: endpoints[name] for name in ids if name not in self.gone}
                await self._look_inside(whole, prompts, conversations)
            await self._add_statistics(ids)
            for build_id, message in result.gone.items():
                self.watcher.note(f"build {build_id} is incomplete: {message}")
            if keep_servers:
                await self._keep(ids)

    def _connect(self, build_id: str, url: str, model: str) -> AbstractAsyncContextManager[Endpoint]:
        engine, options = self.plan.engine, self.plan.options
        return connect(
            build_id, url, model=model, timeout_s=options.request_timeout_s,
            stream=options.stream, echoes_begun_answer=engine.echoes_begun_answer,
            begun_after_generation_prompt=engine.begun_after_generation_prompt,
            returns=engine.returns(launch_args(self.plan, build_id)), template_args=self.campaign.template_args,
            api_key="none" if self.servers else os.environ.get("OPENAI_API_KEY", "none"),
        )  # fmt: skip

    def _page_tokens(self, wave: Sequence[PreparedBuild]) -> int:
        ids = [prepared.build.build_id for prepared in wave]
        by_flag = max(self.plan.engine.page_tokens(launch_args(self.plan, name)) for name in ids)
        return max(by_flag, page_tokens([self.infos.get(name) for name in ids]))

    def _check_alive(self, build_id: str) -> None:
        server = self.servers.get(build_id)
        try:
            if server is not None:
                server.check_alive()
        except ServerError as problem:
            raise BuildGone(str(problem)) from None

    async def _look_inside(
        self, endpoints: Mapping[str, Endpoint], prompts: Prompts, conversations: Sequence[Conversation]
    ) -> None:
        with self.stages.stage("inside_s"):
            for build_id, endpoint in endpoints.items():
                shape = Shape.of(self.plan.model.path, self.infos.get(build_id), self.campaign.onset_tokens)
                wrong = await look_inside(
                    endpoint, prompts, conversations, self.plan.options.inside, self.run_dir, shape,
                    self.campaign.max_tokens,
                )  # fmt: skip
                if wrong is not None:
                    self.watcher.note(f"build {build_id} cannot be looked at from inside: {wrong}")

    async def _add_statistics(self, ids: Sequence[str]) -> None:
        path = self.plan.engine.statistics_path
        if not path:
            return
        servers = [self.servers[name] for name in ids if name in self.servers]
        alive = [server.url for server in servers if server.exit_code() is None]
        for name, value in (await server_statistics(alive, path)).items():
            self.stages.seconds[name] = self.stages.seconds.get(name, 0.0) + value

    async def _keep(self, ids: Sequence[str]) -> None:
        self.watcher.end()
        for build_id in ids:
            if build_id in self.servers:
                self.watcher.note(f"{build_id} serves at {self.servers[build_id].url}/v1")
        self.watcher.note("servers are kept until Ctrl-C")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def _without(failed: Mapping[str, str], watcher: Watcher) -> None:
    """Say which builds are left out; raises CampaignError when the base is one of them."""
    if BASE in failed:
        raise CampaignError(failed[BASE])
    for build_id, message in failed.items():
        watcher.note(f"build {build_id} is left out, the others go on: {message}")


def _first(problem: BaseException) -> BaseException:
    """The first of a task group's exceptions: one clear message, not a tree of them."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


def exit_code(report: Report, fail_on: frozenset[str], gone: Mapping[str, str]) -> int:
    """0 done; 3 incomplete or controls failed; 1 a suspect is a culprit, 4 one is inconclusive (when asked for)."""
    from longrecall.evals.controls import campaign_blocker

    controls = [report.controls[name] for name in ("aa", "positive", "negative")]
    if report.partial or gone or campaign_blocker(controls) is not None:
        return 3
    suspects = {build.build_id for build in report.builds if build.role == "suspect"}
    found = {verdict.verdict for verdict in report.verdicts if verdict.patch in suspects}
    if "culprit" in found and "culprit" in fail_on:
        return 1
    return 4 if "inconclusive" in found and "inconclusive" in fail_on else 0
