"""Commands of runners/: `longrecall serve`.

longrecall serve                          # the reference build on port 8000
longrecall serve --port 0 --index-topk 1024 --threads 2
"""

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
