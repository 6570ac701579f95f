"""Stopping a campaign on its results: which builds need no further questions (`longrecall eval --stop-early`).

A patch is asked no further once its e-values convict or exonerate it (evals/running.py, valid however often they are
looked at); base and base again go on until every patch is decided and the A/A control knows the noise to within the
margin, without which no verdict is given. The same scores give the same answer offline.
"""

from collections.abc import Sequence

from longrecall.evals.running import RunningVerdicts
from longrecall.needles.schema import Conversation
from longrecall.results.schema import Campaign


class EarlyStop:
    """What a campaign's e-values say so far; feed `running` with scores."""

    def __init__(self, campaign: Campaign, conversations: Sequence[Conversation]) -> None:
        builds = campaign.builds
        self.base = next(build.build_id for build in builds if build.role == "base")
        self.again = tuple(build.build_id for build in builds if build.role == "aa")
        self.candidates = tuple(build.build_id for build in builds if build.role not in ("base", "aa"))
        self.running = RunningVerdicts(
            base=self.base,
            candidates=[build.build_id for build in builds if build.build_id != self.base],
            rungs=campaign.rungs,
            order=campaign.conversation_order,
            probes_per_conversation={c.conversation_id: len(c.probes) * campaign.repeats for c in conversations},
            config=campaign.verdict,
            n_suspects=len(self.candidates),
        )

    def finished(self, build_id: str) -> bool:
        """Whether no further reply of this build is needed."""
        of_interest = (build_id,) if build_id in self.candidates else self.candidates
        if not of_interest or any(self.running.decision(name) is None for name in of_interest):
            return False
        return build_id in self.candidates or all(map(self.running.within_margin, self.again))
