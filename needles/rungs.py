"""Context lengths as people write them: "448,1K,2K" or "1M", in tokens."""

import re

_SCALES = {"": 1, "K": 1024, "M": 1024**2}


def parse_rungs(text: str) -> tuple[int, ...]:
    """Increasing lengths in tokens; raises ValueError naming the one at fault."""
    rungs = []
    for part in text.split(","):
        word = part.strip()
        match = re.fullmatch(r"([0-9][0-9_]*)([KkMm]?)", word)
        length = int(match[1].replace("_", "")) * _SCALES[match[2].upper()] if match else 0
        if length < 1:
            raise ValueError(f"--rungs {text!r}: {word!r} is not a length in tokens; write them like 448,1024,2K")
        rungs.append(length)
    if sorted(set(rungs)) != rungs:
        raise ValueError(f"--rungs {text!r}: lengths must increase")
    return tuple(rungs)
