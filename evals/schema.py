"""Records of what the replies mean: `Score`, `Comparison`, `Verdict`, `Attribution`.

Unknown is None, never 0, -1 or NaN.
"""

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1

Outcome = Literal[
    "ok",
    "near-miss",
    "stale",
    "distractor",
    "foreign",
    "refusal",
    "empty",
    "loop",
    "special-token",
    "other",
    "truncated",
    "overflow",
    "error",
]
MISSING: frozenset[str] = frozenset({"truncated", "overflow", "error"})
"""Outcomes that are missing data with a reason: they leave the denominator and are gated apart."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The outcome of one replay, with where its fact stood."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    build_id: str
    conversation_id: str
    cluster_id: str
    probe_id: str
    probe_kind: str
    rung: int
    arm: str
    repeat: int
    outcome: Outcome
    answer: str | None
    """The value read out of the reply, as written there."""
    gold_logprob: float | None = None
    """Sum of natural-log probabilities of the gold answer's tokens."""
    depth_pct: float | None = None
    distance_tokens: int | None = None
    distance_turns: int | None = None
    context_tokens: int | None = None
    cached_tokens: int | None = None
    send_order: int | None = None
    """Place in the order in which the run sent its requests, over all builds."""
    reply_hash: str | None = None
    """12 hex digits of sha256 over the reply's text: two builds that compute the same give the same."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Baseline against candidate at one rung (None: pooled over the rungs named in `pooled_rungs`)."""

    baseline: str
    candidate: str
    rung: int | None
    pooled_rungs: tuple[int, ...] = ()
    n_conversations: int
    n_probes: int
    n_missing: int
    recall_baseline: float | None
    recall_candidate: float | None
    delta_recall: float | None
    """candidate - baseline; negative is a loss."""
    stderr: float | None
    ci_low: float | None
    ci_high: float | None
    p_loss: float | None
    """One-sided cluster-t p-value of "the candidate loses recall"."""
    p_loss_signflip: float | None
    p_loss_holm: float | None
    lower_bound_t: float | None
    """One-sided 95 % cluster-t lower bound of delta_recall."""
    lower_bound_tango: float | None
    """The same by Tango's score statistic with n_eff = conversations."""
    lost: int
    """Probes right on the baseline and wrong on the candidate."""
    gained: int
    e_loss: float | None = None
    """Any-time-valid e-value against "no loss"; convicts at 1/alpha."""
    e_equivalent: float | None = None
    """Any-time-valid e-value against "loses at least the margin"; exonerates at 1/alpha."""


VerdictName = Literal["culprit", "exonerated", "within-margin", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the campaign says of one patch, with the evidence it rests on."""

    patch: str
    verdict: VerdictName
    delta_recall: float | None
    """At the rung with the largest loss, or pooled: see `rung`."""
    ci_low: float | None
    ci_high: float | None
    p_value: float | None
    rung: int | None
    n_conversations: int
    n_probes: int
    more_conversations_needed: int | None
    """For an inconclusive verdict: how many further conversations would settle it."""
    reason: str
    """One sentence a reader can act on."""


@dataclass(frozen=True, kw_only=True)
class VerdictConfig:
    """Everything the verdict rule is told before the data are seen."""

    margin: float = 0.10
    """Delta: the largest loss of recall that still counts as none."""
    alpha: float = 0.05
    max_missing_difference: float = 0.01
    """Verdicts are blocked when the share of missing replies differs by more than this between two builds."""
    aa_alpha: float = 0.01


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """One control of the campaign: did it do what a sound campaign needs?"""

    name: Literal["aa", "positive", "negative"]
    build: str | None
    """None: the campaign has no such control."""
    passed: bool
    detail: str
    comparisons: tuple[Comparison, ...] = ()

    @property
    def state(self) -> Literal["passed", "failed", "absent"]:
        """A control that the campaign does not have did not fail: nobody asked."""
        return "passed" if self.passed else "absent" if self.build is None else "failed"

    @property
    def blocks(self) -> bool:
        """Whether no verdict counts because of it; a campaign may do without a no-op patch."""
        return not self.passed and not (self.name == "negative" and self.build is None)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Replies of one build that are missing data, by outcome."""

    build: str
    n_planned: int
    n_asked: int
    by_outcome: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Recall of one build at one rung with its conversation-clustered 95 % interval."""

    build: str
    rung: int
    recall: float | None
    ci_low: float | None
    ci_high: float | None
    n_conversations: int
    n_probes: int
    outcomes: dict[str, int]


Beyond = Literal["longer", "shorter"]


@dataclass(frozen=True, kw_only=True)
class LengthFit:
    """Recall against length of one build, with conversation-bootstrap 95 % intervals; no verdict uses it."""

    build: str
    n_conversations: int
    l50_tokens: float | None
    """Length at which recall has fallen to half of its plateau; None outside the rungs (see `l50_beyond`), and where
    its interval reaches beyond them on both sides."""
    l50_ci_low: float | None
    l50_ci_high: float | None
    l50_beyond: Beyond | None
    threshold: float
    """Recall that `threshold_tokens` refers to."""
    threshold_tokens: float | None
    threshold_ci_low: float | None
    threshold_ci_high: float | None
    threshold_beyond: Beyond | None
    isotonic_tokens: float | None
    """The same threshold crossed by the isotonic fit, which assumes only that recall does not rise with length."""
    octaves: float | None
    """log2 of this build's L50 over the baseline's, paired by conversation; negative: forgets sooner."""
    octaves_ci_low: float | None
    octaves_ci_high: float | None


@dataclass(frozen=True, kw_only=True)
class LogprobShift:
    """Change of the gold answer's log-probability: an early warning where recall is near its ceiling."""

    baseline: str
    candidate: str
    rung: int
    n_conversations: int
    n_probes: int
    shift_nats: float
    """candidate - baseline per answer; negative: the gold answer became less likely."""
    ci_low: float
    ci_high: float
    p_lower: float
    """One-sided cluster-t p-value of a fall."""


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Replies that changed between right and wrong, which a mean hides when as many are gained as lost."""

    baseline: str
    candidate: str
    rung: int
    lost: int
    gained: int
    n_identical: int
    n_probes: int
    flip_rate: float
    p_more_flips: float | None
    """One-sided cluster-t p-value of "flips more than the base build against itself"; None without an A/A build."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured sign of what a patch does, on the scale of `causes.FEATURES`: 0 none, 1 everything."""

    patch: str
    feature: str
    estimate: float
    stderr: float
    n: int
    """Conversations (served evidence) or samples (in-process evidence) behind it."""
    source: Literal["served", "in-process"]
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CauseFit:
    """How well one cause agrees with everything observed of one patch."""

    cause: str
    family: str
    probability: float
    """Posterior over the known causes, equal prior for each family; a ranking, not a frequency."""
    contradicted_by: tuple[str, ...]
    """Features whose observation the cause all but excludes."""
    predicted: dict[str, str]
    """feature → level, for the features that were observed."""


@dataclass(frozen=True, kw_only=True)
class NextArm:
    """The cheapest further measurement that would separate the causes still standing."""

    feature: str
    question: str
    how: str
    cost: float
    """In builds served at one rung with the prefix cache on."""
    bits: float
    """Expected information about the family of the cause."""
    separates: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Why a patch loses recall: the causes its observations leave standing, and the sentence a reader takes away."""

    patch: str
    causes: tuple[CauseFit, ...]
    """Most probable first; the contradicted ones last."""
    observations: tuple[Observation, ...]
    length_dependent_share: float | None
    """Share of the loss beyond the onset that is absent at or below it; None without a loss or without short rungs."""
    share_ci_low: float | None
    share_ci_high: float | None
    next_arm: NextArm | None
    sentence: str
    families: dict[str, float] = field(default_factory=dict)
    """Family → its probability, the sum over its causes; empty in reports written before there was one."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All that the analysis says of one campaign; recomputable offline from the stored scores."""

    analysis_version: str
    config: VerdictConfig
    curves: tuple[CurvePoint, ...]
    comparisons: tuple[Comparison, ...]
    verdicts: tuple[Verdict, ...]
    controls: tuple[ControlResult, ...]
    missing: tuple[Missing, ...]
    length_fits: tuple[LengthFit, ...] = ()
    logprob_shifts: tuple[LogprobShift, ...] = ()
    flips: tuple[Flips, ...] = ()
