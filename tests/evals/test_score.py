"""A replay becomes a score that says what was answered and where the fact stood."""

import math

import pytest

from longrecall.evals.score import foreign_index, score_replay
from longrecall.needles.schema import Ask, Conversation, Fact, Probe
from longrecall.runners.schema import Replay, Response


def _conversation(name, value, cluster=None):
    fact = Fact(fact_id="f0", entity="Ada", attribute="locker code", value=value, kind="single", turn_index=0)
    probe = Probe(
        probe_id="p0",
        kind="single",
        question="?",
        gold=value,
        live_fact="f0",
        answer_prefix="The locker code of Ada is",
    )
    ask = Ask(rung=448, probe_id="p0", turn_end=1, tail=(), prompt_tokens=448, depth_pct=12.5, distance_tokens=390)
    return Conversation(
        conversation_id=name,
        recipe="r",
        seed=0,
        tokenizer_hash="t",
        template_hash="t",
        rungs=(448,),
        turns=(),
        facts=(fact,),
        probes=(probe,),
        asks=(ask,),
        cluster_id=cluster,
    )


def _score(text, conversation, foreign=frozenset(), **response):
    replay = Replay(
        run_id="r",
        build_id="base",
        conversation_id=conversation.conversation_id,
        probe_id="p0",
        rung=448,
        arm="warm",
        repeat=0,
        send_order=0,
        response=Response(text=text, finish_reason="stop", **response),
    )
    return score_replay(replay, conversation, conversation.asks[0], conversation.probes[0], foreign)


def test_score_carries_outcome_answer_and_position():
    conversation = _conversation("c0", "48213", cluster="template-3")
    score = _score(" 48213.", conversation, prompt_tokens=448, cached_tokens=320, gold_logprobs=(-0.5, -0.25))
    assert (score.outcome, score.answer, score.cluster_id) == ("ok", "48213", "template-3")
    assert (score.depth_pct, score.distance_tokens, score.context_tokens, score.cached_tokens) == (12.5, 390, 448, 320)
    assert score.gold_logprob == -0.75


def test_value_of_another_conversation_is_foreign_and_shared_values_are_not():
    first, second = _conversation("c0", "48213"), _conversation("c1", "70011")
    third, fourth = _conversation("c2", "55555"), _conversation("c3", "55555")
    foreign = foreign_index([first, second, third, fourth])
    assert foreign["c0"] == {"70011"}
    assert _score(" 70011.", first, foreign["c0"]).outcome == "foreign"
    assert _score(" 55555.", first, foreign["c0"]).outcome == "other"


@pytest.mark.parametrize("bad", [(-1.0, math.nan), (-math.inf,), (0.7,), ()])
def test_impossible_log_probabilities_are_unknown_not_numbers(bad):
    assert _score(" 48213.", _conversation("c0", "48213"), gold_logprobs=bad).gold_logprob is None


def test_conversation_without_cluster_is_its_own_cluster():
    assert _score(" 48213.", _conversation("c0", "48213")).cluster_id == "c0"


def test_replay_of_another_question_is_refused():
    first, second = _conversation("c0", "48213"), _conversation("c1", "70011")
    replay = Replay(
        run_id="r",
        build_id="base",
        conversation_id="c1",
        probe_id="p0",
        rung=448,
        arm="warm",
        repeat=0,
        send_order=0,
        response=Response(text="1"),
    )
    with pytest.raises(ValueError, match="c1/p0 at rung 448 scored against c0/p0"):
        score_replay(replay, first, first.asks[0], first.probes[0])
    assert second.conversation_id == "c1"
