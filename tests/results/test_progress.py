"""What is shown while a campaign runs."""

import io
from typing import Any

from rich.console import Console

from longrecall.results.progress import Progress


def test_a_second_campaign_of_one_command_is_counted_from_its_own_beginning(campaign40: Any) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=2000))
    for outcome in ("ok", "wrong"):
        progress.begin(campaign40.campaign, 4, 1)
        for _ in range(4):
            progress.reply("base", 448, outcome, stored=False)
        progress.end()
    first, second = [line for line in out.getvalue().splitlines() if "4/4" in line][-2:]
    assert "base 100/" in first and "base 0/" in second
