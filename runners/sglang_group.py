"""Several SGLang servers and the router before them, started, watched and stopped as one server of one build."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from longrecall.runners.builds import PreparedBuild
from longrecall.runners.processes import HeldPort, Server, ServerError, log_tail, stop_all
from longrecall.runners.schema import Deployment
from longrecall.runners.sglang import flags
from longrecall.runners.sglang_launch import Process, plan_build, ports_of


def visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, by the names that CUDA_VISIBLE_DEVICES takes; none without a driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() and part.strip() != "-1")
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdigit())


def gpus_needed(args: Sequence[str], deployment: Deployment | None) -> int:
    """GPUs that one build takes: of its deployment, or tp x pp of its one server; 0 on another device."""
    given = dict(flags(tuple(args)))
    if given.get("device") not in (None, "cuda"):
        return 0
    if deployment is None:
        return int(given.get("tp_size") or 1) * int(given.get("pp_size") or 1)
    n_servers = deployment.replicas if deployment.kind == "replicas" else deployment.prefill + deployment.decode
    return n_servers * deployment.gpus_per_server


def builds_at_once(args: Sequence[str], deployment: Deployment | None) -> int | None:
    """How many builds the GPUs here can serve at the same time, at least 1; None where GPUs do not bound it."""
    needed = gpus_needed(args, deployment)
    gpus = visible_gpus()
    return None if needed == 0 or not gpus else max(1, len(gpus) // needed)


def gpus_of(place: int, args: Sequence[str], deployment: Deployment | None) -> tuple[str, ...]:
    """The GPUs of the build at `place` of those that are served together."""
    needed = gpus_needed(args, deployment)
    return visible_gpus()[place * needed : (place + 1) * needed]


def make_server(prepared: PreparedBuild, deployment: Deployment | None, folder: Path, place: int) -> Server:
    """The server, or the group of servers, of one build; not started yet."""
    args = prepared.build.manifest.args if prepared.build.manifest else ()
    gpus = gpus_of(place, args, deployment)
    env = prepared.env | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    if deployment is None:
        return Server(prepared.build.build_id, prepared.command, env, folder, HeldPort())
    return ServerGroup(prepared, deployment, env, folder)


class ServerGroup(Server):
    """What a campaign sees of a deployment: one URL, one start, one stop."""

    def __init__(self, prepared: PreparedBuild, deployment: Deployment, env: Mapping[str, str], folder: Path) -> None:
        held = {port.port: port for port in (HeldPort() for _ in range(ports_of(deployment)))}
        plan = plan_build(prepared, deployment, iter(held))
        *servers, router = plan.processes
        name = prepared.build.build_id
        if "sglang-router" in plan.missing:
            for port in held.values():
                port.release()
            raise ServerError(
                f"build {name}: the serving environment has no sglang-router, which a deployment needs:"
                f" {router.command[0]} -m pip install sglang-router"
            )

        def server(process: Process) -> Server:
            made = Server(
                f"{name}/{process.name}", process.command, dict(env) | process.env, folder / process.name,
                held[process.port],
            )  # fmt: skip
            return made

        super().__init__(name, router.command, env, folder / "router", held[router.port])
        self._deployment = deployment
        self._members = {process.name: server(process) for process in servers}
        self._other_ports = [held[port] for process in plan.processes for port in process.other_ports]

    def start(self) -> None:
        """Start the servers; the router follows in `wait_ready`, when there is something to route to."""
        self.started = time.monotonic()
        for member in self._members.values():
            member.start()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for every server, start the router, and wait until a token has come through it."""
        deadline = self.started + timeout_s
        try:
            async with asyncio.TaskGroup() as group:
                for member in self._members.values():
                    if self._deployment.kind == "replicas":
                        group.create_task(member.wait_ready(timeout_s))
                    else:  # a prefill server alone answers nobody
                        group.create_task(_wait_healthy(member, deadline))
        except* ServerError as problems:
            raise ServerError(str(problems.exceptions[0])) from None
        super().start()
        await super().wait_ready(max(10.0, deadline - time.monotonic()))

    def check_alive(self) -> None:
        for member in self._members.values():
            member.check_alive()
        if self.pid is not None:
            super().check_alive()

    def exit_code(self) -> int | None:
        codes = [member.exit_code() for member in self._members.values()] + [super().exit_code()]
        return next((code for code in codes if code is not None), None)

    def info_urls(self) -> dict[str, str]:
        return {name: member.url for name, member in self._members.items()}

    def log_of_this_start(self) -> str:
        return "\n".join(member.log_of_this_start() for member in self._members.values())

    def ask_to_stop(self) -> None:
        super().ask_to_stop()
        for member in self._members.values():
            member.ask_to_stop()

    def stop(self) -> None:
        """End router and servers at the same time; safe to call twice."""
        super().stop()
        stop_all(list(self._members.values()))
        for port in self._other_ports:
            port.release()


async def _wait_healthy(server: Server, deadline: float) -> None:
    said = "nothing was listening"
    async with httpx.AsyncClient(base_url=server.url, timeout=10.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            server.check_alive()
            try:
                reply = await client.get("/health")
                if reply.status_code == 200:
                    return
                said = f"/health answered {reply.status_code}"
            except httpx.HTTPError as problem:
                said = f"{type(problem).__name__}: {problem}"
            await asyncio.sleep(0.5)
    raise ServerError(f"build {server.name}: not ready in time ({said}); its log ends:\n{log_tail(server.log)}")
