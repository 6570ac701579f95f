"""The trainable DeepSeek-V3.2 model: its closed world, its numbers against the references, training, export."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from longrecall.kernels.indexer.reference import indexer_logits_ref
from longrecall.kernels.indexer.rotation import apply_rope
from longrecall.kernels.moe.routing import topk
from longrecall.needles.dataset import write_parquet
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, messages_for
from longrecall.runners.builds import changed_keys
from longrecall.runners.deepseek_v32 import agree, evidence, publish, train
from longrecall.runners.deepseek_v32.config import V32Config
from longrecall.runners.deepseek_v32.export import export, load
from longrecall.runners.deepseek_v32.model import (
    Gate,
    V32Model,
    index_scores,
    rope_half_split,
    rope_interleaved,
    rope_of,
    rope_tables,
    top_selection,
)
from longrecall.runners.deepseek_v32.muon import orthogonalised
from longrecall.runners.deepseek_v32.text import Batch, Shape, Texts, vocabulary, write_tokenizer
from longrecall.runners.engines import ENGINES, engine_of
from longrecall.runners.patchset import load_patchset, read_diffs

ROOT = Path(__file__).resolve().parents[2]
CLOSED_WORLD = ROOT / "patchsets" / "recipes" / "closed-world.toml"
TINY = V32Config(
    vocab_size=len(vocabulary()), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, index_n_heads=4, index_head_dim=16,
    index_topk=48, intermediate_size=32, moe_intermediate_size=8, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
    topk_group=2,
)  # fmt: skip
PLAN = (
    train.Phase(name="dense", length=96, rows=2, steps=4, probes=2, facts=(1, 1), lr=(1.0, 0.5)),
    train.Phase(name="index", kind="indexer", length=96, rows=1, steps=2, probes=2, facts=(1, 1), lr=(1.0, 0.5)),
    train.Phase(name="sparse", kind="sparse", length=96, rows=1, steps=2, probes=2, facts=(1, 1), lr=(0.1, 0.1)),
)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(200)


@pytest.fixture
def model() -> V32Model:
    made = V32Model(TINY)
    made.initialise(0)
    return made.eval()


def trained(plan: Sequence[train.Phase], steps: int, texts: Texts) -> train.Trainer:
    trainer = train.Trainer(TINY, plan, seed=0, device=torch.device("cpu"))
    go_on(trainer, steps, texts)
    return trainer


def go_on(trainer: train.Trainer, steps: int, texts: Texts) -> None:
    for _ in range(steps):
        phase = trainer.plan[trainer.phase]
        trainer.train_step(texts.batch(phase.shape, phase.rows, random.Random(f"{trainer.phase}:{trainer.step}")))
        if trainer.step >= phase.steps and trainer.phase + 1 < len(trainer.plan):
            trainer.next_phase()


# The closed world


def test_a_campaigns_prompts_hold_known_words_only_at_their_exact_length(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ruler = Ruler.from_folder(tmp_path)
    assert ruler.additive
    unknown = ruler.tokenizer.token_to_id("<unk>")
    for conversation in make_conversations(recipe(CLOSED_WORLD), ruler=ruler, rungs=[900, 1500], count=3, seed=5):
        for ask in conversation.asks:
            ids = ruler.encode(messages_for(conversation, ask), continue_final_message=True)
            assert len(ids) == ask.rung and unknown not in ids
        for fact in conversation.facts:
            assert len(ruler.tokenizer.encode(" " + fact.value).ids) == 2


def test_our_own_cut_is_the_tokenizers(tmp_path: Path, texts: Texts) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Ruler.from_folder(tmp_path).tokenizer
    text = "As of today, Ada's locker code is 48213. Thanks, noted! Is it?"
    assert texts.encode(text) == tokenizer.encode(" " + text, add_special_tokens=False).ids
    assert tokenizer.decode(texts.encode(text)) == " " + text


def test_a_word_of_another_world_is_named(texts: Texts) -> None:
    with pytest.raises(ValueError, match="'zebra fact': ' zebra'"):
        texts.encode("zebra fact")


def test_training_text_is_exact_in_length_and_asks_for_what_was_said(texts: Texts) -> None:
    shape = Shape(length=256, probes=4, facts=(3, 4))
    batch = texts.batch(shape, 6, random.Random(1))
    assert batch.ids.shape == (6, 256)
    for ids, answers, weights in zip(batch.ids, batch.answers, batch.weights, strict=True):
        for place in (answers == 2).nonzero()[0]:
            value = ids[place : place + 2].tolist()
            said = [at for at in range(place - 1) if ids[at : at + 2].tolist() == value]
            assert said, "an answer that nobody stated"
            assert weights[place] == 60
    again = texts.batch(shape, 6, random.Random(1))
    assert (batch.ids == again.ids).all()


# Numbers


def test_rope_layouts_are_the_kernels() -> None:
    cos, sin = rope_tables(TINY, 40, "cpu")
    x, where = torch.randn(40, 3, 8), torch.arange(40)
    rope = rope_of(TINY)
    torch.testing.assert_close(rope_half_split(x, cos, sin), apply_rope(x, where, rope))
    torch.testing.assert_close(rope_interleaved(x, cos, sin), apply_rope(x, where, rope.swapped()))


def test_index_scores_are_the_references() -> None:
    q, k, weights = torch.randn(5, 4, 16), torch.randn(9, 16), torch.randn(5, 4)
    torch.testing.assert_close(index_scores(q, k, weights), indexer_logits_ref(q, k, weights), rtol=1e-5, atol=1e-5)


def test_the_gate_chooses_and_weighs_as_the_reference() -> None:
    gate = Gate(TINY)
    torch.nn.init.normal_(gate.weight)
    gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, TINY.n_routed_experts))
    x = torch.randn(50, TINY.hidden_size)
    expected = topk(
        x @ gate.weight.T, gate.e_score_correction_bias, TINY.num_experts_per_tok, "sigmoid",
        num_groups=TINY.n_group, topk_groups=TINY.topk_group,
    )  # fmt: skip
    wide = torch.zeros(50, TINY.n_routed_experts).scatter(1, expected.idx, expected.weights)
    torch.testing.assert_close(gate(x), wide, rtol=1e-5, atol=1e-6)


def test_selection_is_causal_exact_and_nothing_where_all_fit(model: V32Model) -> None:
    q, k, weights = torch.randn(1, 60, 4, 16), torch.randn(1, 60, 16), torch.randn(1, 60, 4)
    assert top_selection(60)(0, q, k, weights) is None
    mask = top_selection(10, chunk=7)(0, q, k, weights)
    assert mask is not None and not mask.triu(1).any()
    assert mask[0].sum(-1).tolist() == [min(place + 1, 10) for place in range(60)]
    scores = index_scores(q[0, 50:51], k[0, :51], weights[0, 50:51])
    assert sorted(scores[0, mask[0, 50, :51]].tolist()) == sorted(scores[0].topk(10).values.tolist())


def test_up_to_index_topk_sparse_attention_is_dense(model: V32Model) -> None:
    ids = torch.randint(8, TINY.vocab_size, (2, TINY.index_topk))
    dense, _ = model(ids)
    sparse, _ = model(ids, select=top_selection(TINY.index_topk))
    assert torch.equal(dense, sparse)
    longer = torch.randint(8, TINY.vocab_size, (1, TINY.index_topk + 20))
    assert not torch.allclose(model(longer)[0], model(longer, select=top_selection(TINY.index_topk))[0])


def test_muon_makes_singular_values_alike() -> None:
    made = orthogonalised(torch.randn(3, 40, 12) @ torch.diag(torch.logspace(0, -1.5, 12))).float()
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5 and values.max() < 1.4


# Training


def test_training_goes_on_where_it_stopped(texts: Texts) -> None:
    whole = trained(PLAN, 7, texts)
    for stop in (2, 5):
        part = trained(PLAN, stop, texts)
        other = train.Trainer(TINY, PLAN, seed=0, device=torch.device("cpu"))
        other.restore(part.state())
        go_on(other, 7 - stop, texts)
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), (stop, name)


KILLED = """
import os, signal, sys
from dataclasses import replace
from longrecall.runners.deepseek_v32 import train
from longrecall.runners.deepseek_v32.config import V32Config
from longrecall.runners.deepseek_v32.text import vocabulary

if __name__ == "__main__":
    train.LOG_EVERY = 2
    state, kill_at = sys.argv[1], int(sys.argv[2])
    replaced, real = 0, os.replace

    def replace_or_die(part, whole):
        global replaced
        replaced += 1
        if replaced == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(part, whole)

    os.replace = replace_or_die
    options = train.parser().parse_args(
        ["--state", state, "--workers", "1", "--save-s", "0", "--judge", "64", "--no-compile"]
    )
    config, plan = eval(sys.argv[3]), eval(sys.argv[4], {"Phase": train.Phase})
    train.train(options, plan, config)
"""


BY_ACCURACY = (replace(PLAN[0], steps=20, enough=0.0), *PLAN[1:])
"""The dense phase ends by accuracy after three windows of two steps."""


def assert_same_training(one_folder: Path, other_folder: Path) -> None:
    """Weights, optimizers and logs, times aside."""
    one, other = (torch.load(folder / "state.pt", weights_only=True) for folder in (one_folder, other_folder))
    assert one["steps"] == other["steps"] == 6 + 2 + 2
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
    assert str(one["optimizers"]) == str(other["optimizers"])
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if key not in ("seconds", "tokens_per_s")}
            for line in (folder / "log.jsonl").read_text().splitlines()
        ]
        for folder in (one_folder, other_folder)
    ]
    assert lines[0] == lines[1] and lines[0][-1]["finished"]


class FeedHere:
    """`train.Feed` without processes."""

    def __init__(self, seed: int, workers: int) -> None:
        self.seed, self.texts = seed, Texts(200)

    def batches(self, phase: train.Phase, first: int) -> Iterator[Batch]:
        for step in count(first):
            yield self.texts.batch(phase.shape, phase.rows, random.Random(f"{self.seed}:{phase.name}:{step}"))

    def close(self) -> None:
        pass


def test_broken_off_while_it_saves_training_ends_in_the_same_weights_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "LOG_EVERY", 2)
    monkeypatch.setattr(train, "Feed", FeedHere)
    monkeypatch.setattr(train, "Texts", lambda: Texts(200))
    real, numbers = os.replace, count(1)

    def replace_or_break_off(part: Path, whole: Path) -> None:
        if next(numbers) == 5:
            raise KeyboardInterrupt
        real(part, whole)

    def go(name: str) -> bool:
        options = train.parser().parse_args(
            ["--state", str(tmp_path / name), "--workers", "1", "--save-s", "0", "--judge", "64", "--no-compile"]
        )
        return train.train(options, BY_ACCURACY, TINY)

    assert go("whole")
    monkeypatch.setattr(os, "replace", replace_or_break_off)
    with pytest.raises(KeyboardInterrupt):
        go("broken")
    # the third window of the dense phase is half full, and the second was logged after the state was kept
    assert torch.load(tmp_path / "broken" / "state.pt", weights_only=True)["steps"] == 4
    assert go("broken")
    assert_same_training(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow
def test_killed_while_it_saves_training_ends_in_the_same_weights(tmp_path: Path) -> None:
    """As above with a real kill, and with the processes that write conversations."""
    (tmp_path / "train_tiny.py").write_text(KILLED)

    def start(state: str, kill_at: int = 0) -> subprocess.Popen[str]:
        arguments = [
            str(tmp_path / "train_tiny.py"),
            str(tmp_path / state),
            str(kill_at),
            repr(TINY),
            repr(BY_ACCURACY),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ns"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def ended(process: subprocess.Popen[str]) -> int:
        try:
            error = process.communicate(timeout=200)[1]
        finally:
            process.kill()
        assert process.returncode in (0, -signal.SIGKILL), error
        return process.returncode

    whole, broken = start("whole"), start("broken", kill_at=5)
    assert ended(broken) == -signal.SIGKILL and (tmp_path / "broken" / "state.part").is_file()
    assert torch.load(tmp_path / "broken" / "state.pt", weights_only=True)["steps"] == 4
    assert ended(start("broken")) == 0 and ended(whole) == 0
    assert_same_training(tmp_path / "whole", tmp_path / "broken")


def test_a_state_that_is_damaged_or_of_another_plan_is_named(tmp_path: Path, texts: Texts) -> None:
    options = train.parser().parse_args(["--state", str(tmp_path), "--workers", "1", "--no-compile"])
    state = tmp_path / "state.pt"
    state.write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"state\.pt cannot be read .*remove it"):
        train.train(options, PLAN, TINY)
    kept = {**trained(PLAN, 1, texts).state(), "log_bytes": 0}
    torch.save(kept, state)
    with pytest.raises(ValueError, match=r"state\.pt has another plan; give another --state"):
        train.train(options, PLAN[:2], TINY)
    with pytest.raises(ValueError, match=r"state\.pt has another config; give"):
        train.train(options, PLAN, replace(TINY, hidden_size=64))
    torch.save({key: value for key, value in kept.items() if key != "window"}, state)
    with pytest.raises(ValueError, match=r"state\.pt is of another version"):
        train.train(options, PLAN, TINY)


def test_the_indexers_phase_leaves_everything_else_as_it_is(texts: Texts) -> None:
    trainer = trained(PLAN, 4, texts)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    go_on(trainer, 2, texts)
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("indexer" in name for name in changed)


def test_the_loss_falls(texts: Texts) -> None:
    plan = [replace(PLAN[0], steps=40, rows=4)]
    trainer = train.Trainer(TINY, plan, seed=0, device=torch.device("cpu"))
    batch = texts.batch(plan[0].shape, 4, random.Random(0))
    losses = [float(trainer.train_step(batch)[0]) for _ in range(25)]
    assert losses[-1] < losses[0] - 0.5


# The checkpoint


@pytest.fixture
def folder(tmp_path: Path, texts: Texts) -> Path:
    torch.save(trained(PLAN, 1, texts).state(), tmp_path / "state.pt")
    export(tmp_path / "state.pt", tmp_path / "model")
    return tmp_path / "model"


def test_an_exported_model_says_the_same(folder: Path, texts: Texts) -> None:
    ids = torch.randint(8, TINY.vocab_size, (1, 70))
    exact = trained(PLAN, 1, texts).model.eval()
    with torch.no_grad():
        for name, value in exact.named_parameters():
            if "indexer.k_norm" not in name:  # stored in fp32
                value.copy_(value.bfloat16())
        assert torch.equal(exact(ids)[0], load(folder)(ids)[0])


def test_the_checkpoint_has_the_names_that_sglang_loads(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.1.mlp.experts.7.gate_proj.weight").get_shape() == [8, 32]
    attention = "model.layers.0.self_attn."
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
             "indexer.wq_b", "indexer.wk", "indexer.k_norm", "indexer.weights_proj")  # fmt: skip
    assert {f"{attention}{part}.weight" for part in parts} | {f"{attention}indexer.k_norm.bias"} <= names
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
    } <= names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in names


def test_evidence_replays_what_a_prompt_leaves_in_the_indexers(folder: Path) -> None:
    model = load(folder)
    ids = torch.randint(8, TINY.vocab_size, (90,)).tolist()
    layers = evidence.captured(model, ids, ids[30], torch.device("cpu"))
    assert len(layers) == TINY.num_hidden_layers and layers[0].keys.shape == (90, 16)
    base = evidence.chosen(layers[0], evidence.FP8)
    exact = evidence.measured(layers[0], "exact", base)
    assert 0 <= exact[0] <= 1 + 1e-5 and 0 < exact[1] <= 1 + 1e-5 and exact[2] > 0.8
    assert evidence.measured(layers[0], evidence.FP8, base)[2] == 1
    lowest = evidence.chosen(layers[0], evidence.LOWEST)
    assert len(lowest) == TINY.index_topk and len(set(lowest.tolist())) == TINY.index_topk
    assert evidence.measured(layers[0], evidence.LOWEST, base)[2] == pytest.approx(
        max(0, 2 - 90 / TINY.index_topk), abs=0.1
    )


def test_a_runs_log_probabilities_are_held_against_torchs(folder: Path) -> None:
    model = load(folder)
    ids = torch.randint(8, TINY.vocab_size, (60,)).tolist()
    said = [11, 12]
    mine = agree.logprobs_of(model, ids, said, torch.device("cpu"))
    with torch.no_grad():
        whole = model.lm_head(model(torch.tensor([[*ids, *said]]), select=top_selection(TINY.index_topk))[0][0])
    for place, (token, (value, best)) in enumerate(zip(said, mine, strict=True), start=59):
        assert value == pytest.approx(float(whole[place].log_softmax(-1)[token]), abs=1e-5)
        assert best == (int(whole[place].argmax()) == token)


def test_a_reply_that_cannot_be_cut_again_is_left_out_and_an_absent_build_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ruler = Ruler.from_folder(folder)
    conversation = next(iter(make_conversations(recipe(str(CLOSED_WORLD)), ruler=ruler, rungs=[450], count=1, seed=0)))
    run, out = tmp_path / "run", tmp_path / "out.json"
    write_run(run, {"base": [(" 1.", [-0.5, -0.1, -0.1]), (" 1.", [-0.5])], "other": [(" 1.", [-0.5])]})
    write_parquet([conversation], run / "conversations.parquet")
    rows = [json.loads(line) for line in (run / "replays.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"conversation_id": conversation.conversation_id, "probe_id": conversation.asks[0].probe_id, "rung": 450}
    (run / "replays.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def told(*more: str) -> int:
        return agree.main([str(folder), "--out", str(out), "--run", str(run), "--lengths", "450", *more])

    assert told() == 0
    assert {k: json.loads(out.read_text())["lengths"]["450"][k] for k in ("n", "left_out", "tokens")} == {
        "n": 1, "left_out": 1, "tokens": 3,
    }  # fmt: skip
    out.unlink()
    assert told("--build", "other") == 2 and "no reply of build 'other' at 450 tokens can be" in capsys.readouterr().err
    assert told("--build", "none") == 2
    assert "no log-probabilities of build 'none' at 450 tokens; it has those of base at 450" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(SystemExit):
        told("--per-length", "0")


def test_a_source_that_was_not_served_is_refused_before_anything_is_computed_or_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patchset = load_patchset(ROOT / "patchsets" / "sglang-v32.toml")
    monkeypatch.setattr(evidence, "load_campaign", lambda run: SimpleNamespace(patchset=patchset))
    monkeypatch.setattr(evidence, "load", lambda *_: pytest.fail("the model is loaded"))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "run" / "patches").mkdir(parents=True)
    arguments = [str(folder), "--out", str(tmp_path / "out" / "e.json"), "--run", str(tmp_path / "run")]
    arguments += ["--sglang", str(tmp_path / "sglang")]
    assert evidence.main(arguments) == 2
    assert "sglang-h200-index-keys-bf16.diff: No such file" in capsys.readouterr().err
    for name in {name for patch in patchset.patches for name in patch.diffs}:
        (tmp_path / "run" / name).write_bytes((ROOT / "patchsets" / name).read_bytes())
    assert evidence.main(arguments) == 2 and "dsa_indexer.py" in capsys.readouterr().err
    assert evidence.main([*arguments, "--lengths", "600", "--per-length", "1"]) == 2
    assert "attribution needs two" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "run").glob("evidence-*"))


def test_what_is_known_of_a_patch_is_kept_for_attribution_and_nothing_where_nothing_is(tmp_path: Path) -> None:
    evidence.write_observations(tmp_path, {"a": [], "b": []}, {"a": [0.25, 0.75], "c": [1.0, 1.0]}, "two prompts")
    assert [path.name for path in tmp_path.iterdir()] == ["evidence-a.json"]
    (row,) = json.loads((tmp_path / "evidence-a.json").read_text())
    assert (row["feature"], row["estimate"], row["stderr"], row["n"]) == ("selection_shift", 0.5, 0.25, 2)


def test_evidence_of_a_run_is_kept_in_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(evidence.PIPELINES, "fp4 keys")  # type: ignore[arg-type]  # in blocks of 32; these keys have 16
    monkeypatch.setattr(evidence, "open_source", lambda where: where)
    monkeypatch.setattr(evidence, "routed_scaling", lambda run, source: {"rope-layout": [], "mla-kv-fp8": []})
    (tmp_path / "run").mkdir()
    assert evidence.main([
        str(folder), "--out", str(tmp_path / "e.json"), "--recipe", str(CLOSED_WORLD), "--lengths", "450", "600",
        "--per-length", "1", "--run", str(tmp_path / "run"),
    ]) == 0  # fmt: skip
    assert json.loads((tmp_path / "e.json").read_text()) == json.loads(capsys.readouterr().out)
    (kept,) = (tmp_path / "run").iterdir()
    (row,) = json.loads(kept.read_text())
    assert kept.name == "evidence-rope-layout.json" and row["n"] == 2 and 0 < row["estimate"] < 1
    chance = 100 * (1 - (48 / 450 + 48 / 600) / 2)
    assert row["detail"].endswith(f"2 prompts' captured activations at 450 and 600 tokens ({chance:.0f} % by chance)")


class Answers:
    """SGLang's /generate with every log-probability, answered by a torch model in bf16; ends after `enough` prompts."""

    def __init__(self, folder: Path, enough: int = 1000) -> None:
        model, self.asked = load(folder).eval(), 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *rest: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.asked += 1
                if owner.asked > enough:
                    self.send_error(503)
                    return
                logs = agree.last_logprobs(model, body["input_ids"], torch.device("cpu"), bf16=True)
                order = (-logs).argsort()[: body["top_logprobs_num"]]
                top = [[float(logs[token]), int(token), None] for token in order]
                meta = {"prompt_tokens": len(body["input_ids"]), "output_top_logprobs": [top]}
                data = json.dumps({"text": "", "meta_info": meta}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *rest: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def agreement(folder: Path, work: Path, port: int, *more: str) -> int:
    return agree.main([
        str(folder), "--out", str(work / "agreement.json"), "--running", "--port", str(port), "--work", str(work),
        "--recipe", str(CLOSED_WORLD), "--lengths", "450", "600", "--per-length", "3", *more,
    ])  # fmt: skip


def test_agreement_over_the_whole_vocabulary_goes_on_where_its_server_died(folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    with Answers(folder, enough=4) as served:
        assert agreement(folder, work, served.port) == 2
    rows = work / "rows.jsonl"
    assert len(rows.read_text().splitlines()) == 1 + 4
    rows.write_text(rows.read_text() + '{"length": 450, "num')  # killed while it wrote
    with Answers(folder) as served:
        assert agreement(folder, work, served.port, "--minutes", "0") == 3 and served.asked == 0
        part = json.loads((work / "agreement.json").read_text())
        assert (part["planned"], part["asked"]) == (6, 4) and part["lengths"]["600"]["sglang"]["n"] == 2
        assert agreement(folder, work, served.port) == 0 and served.asked == 2
    whole = json.loads((work / "agreement.json").read_text())
    for length in ("450", "600"):
        found = whole["lengths"][length]
        assert found["sglang"]["n"] == 3
        # the server is torch in bf16: as far from fp32 as torch in bf16 is, up to printed digits
        assert found["sglang"]["kl_max"] == pytest.approx(found["torch_bf16"]["kl_max"], rel=1e-3)
        assert found["sglang"]["kl_max"] > 0


def test_agreement_sees_another_model_and_refuses_to_mix_rows(
    folder: Path, tmp_path: Path, texts: Texts, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained(PLAN, 1, texts).state()
    state["model"]["lm_head.weight"] = torch.randn(TINY.vocab_size, TINY.hidden_size)
    torch.save(state, tmp_path / "other.pt")
    export(tmp_path / "other.pt", tmp_path / "other")
    work = tmp_path / "work"
    with Answers(tmp_path / "other") as served:
        assert agreement(folder, work, served.port) == 0
        found = json.loads((work / "agreement.json").read_text())["lengths"]["600"]
        assert found["sglang"]["kl_median"] > 10 * found["torch_bf16"]["kl_max"]
        assert agreement(tmp_path / "other", work, served.port) == 2
    assert "rows.jsonl is of another model or other prompts" in capsys.readouterr().err


def test_damaged_rows_of_an_agreement_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n{"length": 450}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl is damaged \(KeyError\('number'\)\); remove it"):
        agree.Rows(rows, {"a": 1})
    rows.write_text("]\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl is damaged"):
        agree.Rows(rows, {"a": 1})
    rows.write_text('{"a": 1}\n{"length": 450, "number": 0}\n{"len')
    assert set(agree.Rows(rows, {"a": 1}).done) == {(450, 0)}


def write_run(run: Path, said: dict[str, list[tuple[str, list[float]]]], *, partial: bool = False) -> None:
    """A finished campaign: of each build, text and log-probabilities of its replies to the same questions."""
    run.mkdir()
    lines = [
        {
            "schema_version": 1, "run_id": "run", "build_id": build, "conversation_id": "c", "probe_id": f"c/p{place}",
            "rung": 1024, "arm": "warm", "repeat": 0, "send_order": place,
            "response": {"text": text, "finish_reason": "stop", "token_logprobs": logs},
        }
        for build, replies in said.items() for place, (text, logs) in enumerate(replies)
    ]  # fmt: skip
    (run / "replays.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    info = {"manifest": {"server_info": {"model_path": "/somewhere/model"}}}
    report = {"partial": partial, "builds": [info], "served": "/somewhere/model"}
    (run / "report.json").write_text(json.dumps(report))
    (run / "report.md").write_text("Served /somewhere/model.\n")


def test_what_is_published_names_no_path_and_counts_replies_equal_to_bases(folder: Path, tmp_path: Path) -> None:
    said = {
        "base": [(" 1.", [-0.5, -0.1]), (" 2.", [-0.25])],
        "base-again": [(" 1.", [-0.5, -0.1]), (" 2.", [-0.25])],
        "rope-layout": [(" 1.", [-0.75, -0.1]), (" 3.", [-0.25])],
    }
    write_run(tmp_path / "run", said)
    (tmp_path / "agreement.json").write_text('{"asked": 100, "planned": 100}')
    for name in ("evidence.json", "log.jsonl"):
        (tmp_path / name).write_text("{}\n")
    arguments = ["--model", str(folder), "--out", str(tmp_path / "out")]
    for option, name in (
        ("log", "log.jsonl"),
        ("run", "run"),
        ("agreement", "agreement.json"),
        ("evidence", "evidence.json"),
    ):
        arguments += [f"--{option}", str(tmp_path / name)]
    assert publish.main(arguments) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" not in written and {"config.json", "hashes.json", "training.jsonl"} <= written.keys()
    assert written["report.md"] == "Served MODEL.\n" and "/somewhere" not in written["report.json"]
    beside = json.loads(written["beside_base.json"])
    assert beside["base-again/1024"]["same_logprobs"] == 2 and beside["base-again/1024"]["first_token_max"] == 0
    assert beside["rope-layout/1024"] == {
        "replies": 2, "same_text": 1, "same_logprobs": 1, "first_token_median": 0.125,
        "first_token_p95": pytest.approx(0.2375), "first_token_max": 0.25,
    }  # fmt: skip


def test_nothing_is_published_of_what_is_not_finished(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", {"base": [(" 1.", [-0.5])]}, partial=True)
    (tmp_path / "agreement.json").write_text('{"asked": 60, "planned": 100}')
    (tmp_path / "other.json").write_text("{}")

    def go(evidence: str) -> str:
        assert publish.main([
            "--model", str(folder), "--log", str(tmp_path / "other.json"), "--run", str(tmp_path / "run"),
            "--agreement", str(tmp_path / "agreement.json"), "--evidence", str(tmp_path / evidence),
            "--out", str(tmp_path / "out"),
        ]) == 2  # fmt: skip
        return capsys.readouterr().err

    assert "absent.json" in go("absent.json")
    assert "the campaign is not finished" in go("other.json")
    (tmp_path / "run" / "report.json").write_text('{"partial": false}')
    assert "60 of 100 prompts" in go("other.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("agreement.json", "[]", "agreement.json: no JSON object"),
        ("agreement.json", "{}", "agreement.json: no asked in it"),
        ("agreement.json", '{"asked": 1, "planned": 1, "weights": "0123"}', "agreement.json: of weights 0123, where"),
        ("evidence.json", "{", "evidence.json: no JSON: "),
        ("run/report.json", "{}", "report.json: no partial in it"),
        ("run/report.json", '{"partial": false, "builds": []}', "no builds.0.manifest.server_info.model_path in it"),
        ("run/replays.jsonl", "", "replays.jsonl: no replies of base and of another build"),
        ("log.jsonl", b"\xff\xfe", "log.jsonl: no text"),
    ],
)
def test_nothing_is_published_of_what_cannot_be_read_or_is_of_another_model(
    file: str, text: str | bytes, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", {"base": [(" 1.", [-0.5])], "base-again": [(" 1.", [-0.5])]})
    arguments = ["--model", str(folder), "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    whole = {"agreement.json": '{"asked": 1, "planned": 1}', "evidence.json": "{}", "log.jsonl": "{}\n"}
    for name, default in whole.items():
        (tmp_path / name).write_text(default)
        arguments += [f"--{name.partition('.')[0]}", str(tmp_path / name)]
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert publish.main(arguments) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_fp8_selection_differs_from_the_exact_one_at_the_boundary_alone() -> None:
    q, k, weights = torch.randn(1, 300, 4, 16), torch.randn(1, 300, 16), torch.randn(1, 300, 4)
    exact, rounded = top_selection(64)(0, q, k, weights), agree.fp8_selection(64)(0, q, k, weights)
    assert exact is not None and rounded is not None and agree.fp8_selection(300)(0, q, k, weights) is None
    assert torch.equal(exact.sum(-1), rounded.sum(-1))
    shared = float((exact & rounded).sum() / exact.sum())
    assert 0.9 < shared < 1


def test_heads_begin_by_looking_back_and_by_matching_what_they_brought() -> None:
    config = V32Config(vocab_size=300, num_hidden_layers=2)
    model = V32Model(config)
    model.initialise(0)
    ids = torch.randint(8, 300, (1, 40))
    ids[0, 10], ids[0, 11], ids[0, 38], ids[0, 39] = 150, 151, 150, 151  # "of Ada is" at 10, and again at the end
    seen: dict[int, torch.Tensor] = {}

    def look(layer: int, normed: torch.Tensor, latent: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        scores = torch.einsum("qhd,shd->hqs", q[0], k[0]) * config.softmax_scale
        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
        seen[layer] = scores.masked_fill(hidden, -torch.inf).softmax(-1)

    with torch.no_grad():
        model(ids, look=look)
    for head in range(4):
        assert seen[0][head].diagonal(-1 - head).mean() > 0.9
    assert int(seen[1][1, 39].argmax()) == 12  # two places after the name, where its value would stand


def test_the_patchset_and_its_recipe_can_be_read() -> None:
    patchset = load_patchset(ROOT / "patchsets" / "sglang-v32.toml")
    assert {patch.role for patch in patchset.patches} == {"suspect", "positive-control", "negative-control"}
    assert all(read_diffs(patchset, patch) or patch.args for patch in patchset.patches)
    assert engine_of(patchset).name == "sglang" and recipe(CLOSED_WORLD).answer_prefix


def test_how_sglang_came_to_its_settings_is_not_compared_between_builds() -> None:
    base = {"internal_states": [{"_resolved_overrides": [["kv", "bfloat16"]], "dsa_decode_backend": "fa3"}]}
    other = {"internal_states": [{"_resolved_overrides": [["kv", "fp8"]], "dsa_decode_backend": "flashmla_kv"}]}
    changed = changed_keys(base, other, ENGINES["sglang"])
    assert len(changed) == 1 and "dsa_decode_backend" in changed[0]
