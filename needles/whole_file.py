"""A text file that is there whole or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write beside the file, then rename; its folder is made. Raises OSError and leaves nothing half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
