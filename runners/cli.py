"""Commands of runners/: `longrecall serve` and `longrecall builds`.

longrecall serve                          # the reference build on port 8000
longrecall serve --port 0 --index-topk 1024 --threads 2
longrecall builds patchsets/reference.toml
longrecall builds patchsets/reference.toml --json
longrecall builds patchsets/sglang-cpu.toml --dry-run
"""

import json
from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[Path | None, typer.Option(help="Model folder; made in the cache when left out.")] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one, printed as JSON.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[str, typer.Option(help="Name that requests give as `model`.")] = "reference",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of the model.", min=1)] = 1,
    index_topk: Annotated[int | None, typer.Option(help="Tokens the indexer selects (default 512).")] = None,
    context_length: Annotated[int | None, typer.Option(help="Longest prompt and completion together.")] = None,
    chunked_prefill_size: Annotated[int, typer.Option(help="Prompt tokens per prefill call.", min=1)] = 2048,
    prefix_cache_mb: Annotated[int, typer.Option(help="Memory for reusable prefixes.", min=0)] = 1024,
    disable_radix_cache: Annotated[bool, typer.Option("--disable-radix-cache", help="Reuse no prefix.")] = False,
) -> None:
    """Serve one reference build over HTTP; SIGTERM or Ctrl-C ends it."""
    from longrecall.runners.reference.server import ServerArgs, run

    try:
        args = ServerArgs(
            folder=folder,
            host=host,
            port=port,
            served_model_name=served_model_name,
            device=device,
            dtype=dtype,
            threads=threads,
            index_topk=index_topk,
            context_length=context_length,
            chunked_prefill_size=chunked_prefill_size,
            prefix_cache_mb=prefix_cache_mb,
            disable_radix_cache=disable_radix_cache,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run(args)


def builds(
    patchset: Annotated[Path, typer.Argument(help="Patchset file (TOML).")] = Path("patchsets/reference.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with every manifest.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands that would serve them.")] = False,
    first_port: Annotated[int, typer.Option(min=1024, max=65535, help="Lowest port of a dry run.")] = 30_000,
    model_folder: Annotated[str, typer.Option(help="Model folder in the commands of a dry run.")] = "{model}",
) -> None:
    """Make the source trees of a patchset's builds and show how each differs from the base; starts nothing."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from longrecall.runners.builds import ModelFolder, given_builds, prepare_builds
    from longrecall.runners.engines import engine_of
    from longrecall.runners.patchset import load_patchset

    try:
        read = load_patchset(patchset)
        engine = engine_of(read)
        unknown = ModelFolder(path=Path(model_folder), weights_hash=None, tokenizer_hash=None, template_hash=None)
        prepared = prepare_builds(read, engine, unknown, threads=1) if engine.launches else given_builds(read)
    except (ValueError, OSError) as problem:
        typer.echo(f"longrecall: error: {problem}", err=True)
        raise typer.Exit(2) from None
    if dry_run:
        from longrecall.runners.sglang_launch import launch_plans, shell_text

        try:
            plans = launch_plans(prepared, read.deployment, first_port=first_port)
        except ValueError as problem:
            typer.echo(f"longrecall: error: {problem}", err=True)
            raise typer.Exit(2) from None
        if as_json:
            typer.echo(json.dumps([asdict(plan) for plan in plans], separators=(",", ":")))
        else:
            typer.echo("\n\n".join(map(shell_text, plans)))
        return
    if as_json:
        document = [
            {**asdict(item.build), "tree": str(item.tree), "command": item.command, "endpoint": item.endpoint}
            for item in prepared
        ]
        typer.echo(json.dumps(document, separators=(",", ":")))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for head in ("build", "role", "source", "differs from the base by"):
        table.add_column(head, overflow="fold")
    patches = {patch.patch_id: patch for patch in read.patches}
    for item in prepared:
        patch = patches.get(item.build.build_id)
        settings = [f"{name}={value}" for name, value in patch.env.items()] if patch else []
        parts = [*patch.diffs, *settings, " ".join(patch.args), patch.endpoint or ""] if patch else []
        if patch:
            parts += [f"config {name}={value!r}" for name, value in patch.model_override.items()]
            parts += [patch.source_patcher or "", " ".join(patch.build_command)]
        manifest = item.build.manifest
        source = manifest.tree_hash[:12] if manifest else item.endpoint or ""
        differs = ", ".join(part for part in parts if part) or "nothing"
        table.add_row(item.build.build_id, item.build.role, source, escape(differs))
    Console().print(table)
