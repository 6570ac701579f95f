"""In-process evidence of a run's patches on the reference build, kept in its folder as evidence-<patch>.json.

Each build is made again from the patchset (and found in the store); it must be the source that was served.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from longrecall.results import run_folder
from longrecall.results.plan import find_model
from longrecall.runners.builds import BASE, ModelFolder, PreparedBuild, prepare_builds
from longrecall.runners.engines import engine_of
from longrecall.runners.patchset import load_patchset

PREFIX = "evidence-"


class InProcessError(RuntimeError):
    """Evidence that cannot be gathered; the message says why."""


def evidence_path(run_dir: Path, patch: str) -> Path:
    return run_dir / f"{PREFIX}{patch}.json"


def explain_losses(run_dir: Path, model: ModelFolder, note: Callable[[str], None]) -> bool:
    """Measure the patches that are shown to lose recall; whether there is evidence that was not there before.

    A verdict does not rest on it: what goes wrong is said, and the run is what it was.
    """
    from longrecall.evals.explain import losing_patches
    from longrecall.evals.stored_run import load_run

    by_id = {p.patch_id: p for p in run_folder.load_campaign(run_dir).patchset.patches}
    losing = [name for name in losing_patches(load_run(run_dir)) if name in by_id and by_id[name].diffs]
    open_ = [name for name in losing if not evidence_path(run_dir, name).is_file()]
    try:
        gather_evidence(run_dir, open_, note, model=model)
    except (ValueError, RuntimeError, OSError) as error:
        note(f"not measured in-process: {error}")
    return any(evidence_path(run_dir, name).is_file() for name in open_)


def gather_evidence(
    run_dir: Path,
    patches: Iterable[str],
    note: Callable[[str], None] = lambda text: None,
    *,
    model: ModelFolder | None = None,
) -> list[Path]:
    """Measure the named patches of a run that have no evidence yet; the files of all of them.

    model: the model folder, where it has been found already.

    Raises InProcessError for another engine, a patch without a diff, or sources that are not the served ones any more.
    """
    wanted = list(patches)
    open_ = [name for name in wanted if not evidence_path(run_dir, name).is_file()]
    if open_:
        _measure(run_dir, open_, note, model)
    return [evidence_path(run_dir, name) for name in wanted]


def _measure(run_dir: Path, patches: Sequence[str], note: Callable[[str], None], model: ModelFolder | None) -> None:
    from longrecall.runners.reference.evidence import gather

    campaign = run_folder.load_campaign(run_dir)
    patchset = load_patchset(Path(campaign.patchset.path))
    engine = engine_of(patchset)
    if engine.name != "reference":
        raise InProcessError(f"engine {engine.name!r} has no in-process parts here; give observations with --evidence")
    by_id = {p.patch_id: p for p in patchset.patches}
    for name in patches:
        if name not in by_id or not by_id[name].diffs:
            raise InProcessError(f"patch {name!r} changes no source, so that it has nothing to measure in-process")
    model = model or find_model(engine, None, note)
    prepared = {p.build.build_id: p for p in prepare_builds(patchset, engine, model, threads=1)}
    served = {b.build_id: b for b in campaign.builds}
    for name in (BASE, *patches):
        _check_source(run_dir, prepared[name], served[name].manifest)
    note(f"in-process evidence of {len(patches)} builds")
    builds = {name: (prepared[name].command[0], prepared[name].env) for name in (BASE, *patches)}
    with tempfile.TemporaryDirectory(prefix="longrecall-evidence-") as work:
        for name, rows in gather(model.path, builds, Path(work)):
            # at once: a process that is ended in the middle of many patches goes on with the next
            run_folder.write_bytes(evidence_path(run_dir, name), (json.dumps(rows, indent=1) + "\n").encode())
            note(f"{name}: {'; '.join(str(row['detail']) for row in rows)}")


def _check_source(run_dir: Path, prepared: PreparedBuild, served: object) -> None:
    now, then = getattr(prepared.build.manifest, "tree_hash", None), getattr(served, "tree_hash", None)
    if now != then:
        raise InProcessError(
            f"build {prepared.build.build_id} of {run_dir} was served from other sources ({str(then)[:12]}) than those"
            f" here ({str(now)[:12]}): check out its commit, or run the campaign again"
        )
