"""What passes and what counts as a change: read from a TOML file, kept as an append-only setting of the history.

[gate]
margin = 0.05            # largest loss of recall that still counts as none
fail_on = ["culprit", "inconclusive"]

[trend]
max_pvalue = 0.001       # Otava's names
min_magnitude = 0.02     # smallest change of recall that is worth a point
window_len = 50
"""

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from longrecall.results.history import History
from longrecall.results.storage import HistoryError

FAIL_ON = ("culprit", "within-margin", "inconclusive")


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The defaults are the campaign's own margin and Otava's settings, with a floor of 2 points."""

    margin: float | None = None
    """None: the margin that the campaign was run with."""
    fail_on: tuple[str, ...] = ("culprit", "inconclusive")
    max_pvalue: float = 0.001
    min_magnitude: float = 0.02
    window_len: int = 50


SECTIONS = {"gate": ("margin", "fail_on"), "trend": ("max_pvalue", "min_magnitude", "window_len")}


def read_thresholds(path: Path) -> Thresholds:
    """The file's thresholds. Raises HistoryError naming the file and the key at fault."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HistoryError(f"no such file: {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HistoryError(f"{path}: not TOML: {error}") from error
    values: dict[str, Any] = {}
    for section, table in data.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise HistoryError(f"{path}: unknown section [{section}]; there are [gate] and [trend]")
        for key, value in table.items():
            if key not in SECTIONS[section]:
                raise HistoryError(f"{path}: unknown key {section}.{key}; there are {', '.join(SECTIONS[section])}")
            values[key] = value
    return checked(values, str(path))


def checked(values: dict[str, Any], where: str) -> Thresholds:
    """Thresholds with every value in its range; unknown keys (of a later version) are left out."""
    known = {f.name for f in fields(Thresholds)}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    made = Thresholds(**values)
    for name, low, high in (
        ("margin", 0, 1),
        ("max_pvalue", 0, 1),
        ("min_magnitude", -1e-9, 1),
        ("window_len", 3, 10**6),
    ):
        value = asdict(made)[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high
        ):
            raise HistoryError(f"{where}: {name} = {value!r} is not a number between {low:g} and {high:g}")
    wrong = [kind for kind in made.fail_on if kind not in FAIL_ON]
    if wrong:
        raise HistoryError(f"{where}: fail_on has {wrong[0]!r}; it takes {', '.join(FAIL_ON)}")
    return made


def current_thresholds(history: History) -> Thresholds:
    """The thresholds that hold now."""
    setting = history.current("thresholds", "all")
    return (
        checked(setting.value, f"{history.storage.url}: thresholds of {setting.created}") if setting else Thresholds()
    )
