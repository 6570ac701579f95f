"""What a campaign shows while it runs: builds × rungs with running recall, and the time left.

On a terminal a live table; elsewhere (CI, a pipe) one plain line every few seconds of progress. Everything goes to
standard error: standard output carries the last line for programs.
"""

import time
from collections import Counter

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from longrecall.evals.schema import MISSING
from longrecall.results.schema import Campaign
from longrecall.results.watching import Watcher

PLAIN_EVERY_S = 15.0


class Progress(Watcher):
    """Shows notes as they come and the state of the replay; `quiet` shows nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._started = time.monotonic()
        self._campaign: Campaign | None = None
        self._planned = self._per_build = 0
        self._forget()
        self._live: Live | None = None
        self._asking_since = 0.0
        self._last_line = 0.0

    def _forget(self) -> None:
        self._done = self._stored = 0
        self._right: Counter[tuple[str, int]] = Counter()
        self._counted: Counter[tuple[str, int]] = Counter()
        self._missing: Counter[str] = Counter()

    def note(self, text: str) -> None:
        if self.quiet:
            return
        stamp = _clock(time.monotonic() - self._started)
        self.console.print(Text.assemble((f"{stamp}  ", "dim"), text), soft_wrap=True)

    def begin(self, campaign: Campaign, planned: int, per_build: int) -> None:
        self._campaign, self._planned, self._per_build = campaign, planned, per_build
        self._forget()  # one command may ask several campaigns
        self._asking_since = time.monotonic()
        if not self.quiet and self.console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=2, transient=False)
            self._live.start()

    def reply(self, build_id: str, rung: int, outcome: str, *, stored: bool) -> None:
        self._done += 1
        self._stored += stored
        if not stored and self._done - self._stored == 1:
            self._asking_since = time.monotonic()
        if outcome in MISSING:
            self._missing[build_id] += 1
        else:
            self._counted[build_id, rung] += 1
            self._right[build_id, rung] += outcome == "ok"
        now = time.monotonic()
        if self._live is None and not self.quiet and not stored and now - self._last_line > PLAIN_EVERY_S:
            self._last_line = now
            self._plain_line()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._campaign is not None and not self.quiet and self._done:
            self._plain_line()
        self._campaign = None

    def time_left_s(self) -> float | None:
        """From the rate since the asking began; None in the first seconds."""
        asked, spent = self._done - self._stored, time.monotonic() - self._asking_since
        if asked < 2 or spent < 3:
            return None
        return spent / asked * (self._planned - self._done)

    def _recall(self, build: str, rung: int) -> str:
        counted = self._counted[build, rung]
        return f"{100 * self._right[build, rung] / counted:.0f}" if counted else "-"

    def _plain_line(self) -> None:
        assert self._campaign is not None
        left = self.time_left_s()
        cells = "  ".join(
            f"{build.build_id} {'/'.join(self._recall(build.build_id, rung) for rung in self._campaign.rungs)}"
            for build in self._campaign.builds
        )
        self.note(f"{self._done}/{self._planned}, {_clock(left)} left; recall %: {cells}")

    def _table(self) -> Group | Text:
        if self._campaign is None:
            return Text("")
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        table.add_column("recall, %")
        for rung in self._campaign.rungs:
            table.add_column(f"{rung:,}", justify="right")
        table.add_column("asked", justify="right")
        table.add_column("missing", justify="right")
        for build in self._campaign.builds:
            name = build.build_id
            asked = sum(self._counted[name, rung] for rung in self._campaign.rungs) + self._missing[name]
            table.add_row(
                name,
                *(self._recall(name, rung) for rung in self._campaign.rungs),
                f"{asked}/{self._per_build}",
                str(self._missing[name] or ""),
            )
        bar = ProgressBar(total=max(1, self._planned), completed=self._done, width=48)
        status = Text(f"{self._done}/{self._planned} answered, {_clock(self.time_left_s())} left", style="dim")
        return Group(table, bar, status)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )
