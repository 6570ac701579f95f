"""Launch plans: every command, variable and port with which a build is served, written down before anything starts.

    longrecall builds patchsets/pd.toml --dry-run

One server; or prefill and decode on servers of their own behind SGLang's router; or equal replicas behind it. Flags are
those of SGLang (python/sglang/test/server_fixtures/disaggregation_fixture.py) and of the package sglang-router.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longrecall.runners.builds import PreparedBuild
from longrecall.runners.schema import Deployment
from longrecall.runners.sglang import flags

FIRST_PORT = 30_000
_TRANSFER_PACKAGES = {
    "mooncake": "mooncake-transfer-engine",
    "mooncake_tcp": "mooncake-transfer-engine",
    "nixl": "nixl",
}
_SHOWN_ENV = (
    "PYTHONPATH", "PYTHONSAFEPATH", "CUDA_VISIBLE_DEVICES", "TVM_FFI_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a plan."""

    name: str
    """server; prefill-0, decode-0, replica-0, …; router."""
    command: tuple[str, ...]
    env: dict[str, str]
    """What the plan sets; the rest of the environment is passed through."""
    port: int
    """Where it answers HTTP."""
    other_ports: tuple[int, ...] = ()
    """Ports it opens besides: NCCL, and the bootstrap of prefill and decode."""
    gpus: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How one build is served."""

    build_id: str
    processes: tuple[Process, ...]
    """In the order in which they start; the last one is the one that is asked."""
    missing: tuple[str, ...]
    """Packages that the plan needs and the serving environment does not have."""

    @property
    def endpoint(self) -> str:
        return self.processes[-1].url


def _ports(first: int) -> Iterator[int]:
    while first < 65_536:
        yield first
        first += 1
    raise ValueError("no port is left below 65536; give a lower --first-port")


def launch_plans(
    builds: Sequence[PreparedBuild], deployment: Deployment | None, *, first_port: int = FIRST_PORT
) -> list[LaunchPlan]:
    """A plan for each build. No two processes share a port; GPUs are counted from 0 for each build.

    Builds of several GPUs take turns: plans of different builds name the same GPUs.
    """
    ports = _ports(first_port)
    return [plan_build(build, deployment, ports) for build in builds if build.endpoint is None]


def ports_of(deployment: Deployment) -> int:
    """How many ports one build opens: HTTP and NCCL of each server, a prefill's bootstrap, the router's two."""
    if deployment.kind == "replicas":
        return 2 * deployment.replicas + 2
    return 3 * deployment.prefill + 2 * deployment.decode + 2


def plan_build(prepared: PreparedBuild, deployment: Deployment | None, ports: Iterator[int]) -> LaunchPlan:
    """How one build is served, with ports taken from `ports` in order."""
    build_id = prepared.build.build_id
    declared = prepared.build.manifest.env if prepared.build.manifest else {}
    env = {name: prepared.env[name] for name in (*_SHOWN_ENV, *declared) if name in prepared.env}
    if deployment is None:
        return LaunchPlan(build_id=build_id, processes=(_server("server", prepared, env, next(ports)),), missing=())
    env |= {"SGLANG_HOST_IP": "127.0.0.1"}  # else SGLang may pick a link-local IPv6 address
    python = prepared.command[0]
    if deployment.kind == "pd":
        roles = [f"prefill-{i}" for i in range(deployment.prefill)] + [f"decode-{i}" for i in range(deployment.decode)]
    else:
        roles = [f"replica-{i}" for i in range(deployment.replicas)]
    servers = []
    bootstraps: dict[str, int] = {}
    for place, role in enumerate(roles):
        port, nccl = next(ports), next(ports)
        first_gpu = place * deployment.gpus_per_server
        gpus = tuple(range(first_gpu, first_gpu + deployment.gpus_per_server))
        on_gpus = dict(flags(prepared.command)).get("device") in (None, "cuda")
        gpus = gpus if on_gpus else ()
        extra = [*(("--base-gpu-id", str(first_gpu)) if on_gpus else ()), "--nccl-port", str(nccl)]
        if deployment.gpus_per_server > 1 and not {"--tp", "--tp-size"} & set(prepared.command):
            extra += ["--tp-size", str(deployment.gpus_per_server)]
        others = [nccl]
        if deployment.kind == "pd":
            extra += ["--disaggregation-mode", role.partition("-")[0]]
            extra += ["--disaggregation-transfer-backend", deployment.transfer_backend]
            if role.startswith("prefill"):
                bootstraps[role] = next(ports)
                extra += ["--disaggregation-bootstrap-port", str(bootstraps[role])]
                others.append(bootstraps[role])
        servers.append(_server(role, prepared, env, port, tuple(extra), tuple(others), gpus))
    router_port, metrics_port = next(ports), next(ports)
    # Without retries: what a server failed to answer is counted, not asked again behind our back.
    command = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(router_port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--disable-retries",
    ]  # fmt: skip
    if deployment.kind == "pd":
        command += ["--pd-disaggregation"]
        for server in servers:
            if server.name in bootstraps:
                command += ["--prefill", server.url, str(bootstraps[server.name])]
            else:
                command += ["--decode", server.url]
    else:
        command += ["--worker-urls", *(server.url for server in servers)]
    command += ["--policy", deployment.policy]
    router = Process(
        name="router", command=tuple(command), env=env, port=router_port, other_ports=(metrics_port,)
    )  # fmt: skip
    needed = ["sglang-router"]
    if deployment.kind == "pd" and deployment.transfer_backend in _TRANSFER_PACKAGES:
        needed.append(_TRANSFER_PACKAGES[deployment.transfer_backend])
    have = prepared.build.manifest.packages if prepared.build.manifest else {}
    missing = tuple(name for name in needed if name not in have)
    return LaunchPlan(build_id=build_id, processes=(*servers, router), missing=missing)


def _server(
    name: str,
    prepared: PreparedBuild,
    env: dict[str, str],
    port: int,
    extra: tuple[str, ...] = (),
    other_ports: tuple[int, ...] = (),
    gpus: tuple[int, ...] = (),
) -> Process:
    command = tuple(part.replace("{port}", str(port)) for part in prepared.command) + extra
    return Process(name=name, command=command, env=env, port=port, other_ports=other_ports, gpus=gpus)


def shell_text(plan: LaunchPlan) -> str:
    """The plan as lines for a shell, with comments."""
    lines = [f"# build {plan.build_id}: ask {plan.endpoint}/v1"]
    if plan.missing:
        lines.append(f"# not in the serving environment: {', '.join(plan.missing)}")
    for process in plan.processes:
        gpus = f", GPU {' '.join(map(str, process.gpus))}" if process.gpus else ""
        also = f" (also {', '.join(map(str, process.other_ports))})" if process.other_ports else ""
        lines.append(f"# {process.name}: port {process.port}{also}{gpus}")
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(process.env.items()))
        lines.append(env + shlex.join(process.command))
    return "\n".join(lines)
