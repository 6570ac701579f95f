"""The H200 table: its arithmetic, its decoding, the diffs it serves, and a whole run against a loopback engine.

The engine of the whole run is a package named `sglang` with the routes and reply shapes of SGLang 0.5.17, whose
distributions are a function of the tokens: a diff to it must show where it acts and nowhere else.
"""

import base64
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.runners import divergence
from longrecall.runners.diffs import apply_diff
from longrecall.runners.patchset import load_patchset, read_diffs

ROOT = Path(__file__).resolve().parents[2]
PATCHSETS = (ROOT / "patchsets/sglang-h200.toml", ROOT / "patchsets/sglang-h200-v4.toml")

ENGINE = """\
import argparse, base64, json, math, struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SELECTION = 0
LOGITS = 0.0
V, K, LAYERS = 32, 44, 2
cache = set()


def distribution(tokens):
    # Beyond K tokens the selection matters, up to K it does not.
    seed = sum((i + 1) * t for i, t in enumerate(tokens[-4:])) + (SELECTION if len(tokens) > K else 0)
    raw = [math.sin(seed + 7 * v) + LOGITS * (v == 3) for v in range(V)]
    total = math.log(sum(math.exp(x) for x in raw))
    return [[x - total, v, None] for v, x in enumerate(raw)]


def selection(t):
    if t < K:
        return list(range(t + 1)) + [-1] * (K - t - 1)
    return [(SELECTION + j) % (t + 1) for j in range(K)]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, value):
        text = json.dumps(value).encode() if not isinstance(value, str) else value.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer({"version": "test", "page_size": 4} if self.path == "/server_info" else "ok")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/flush_cache"):
            cache.clear()
            return self.answer("Cache flushed.")
        ids, start = body["input_ids"], body["logprob_start_len"]
        cached = (start // 4 * 4) if tuple(ids) in cache else 0
        cache.add(tuple(ids))
        tops = [None] + [distribution(ids[: i + 1]) for i in range(start, len(ids) - 1)]
        out, out_tops = [], []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            top = distribution(ids + out)
            out_tops.append(top)
            out.append(max(top)[1])
        meta = {"input_top_logprobs": tops, "output_top_logprobs": out_tops, "cached_tokens": cached}
        if body["return_indexer_topk"]:
            rows = [x for t in range(len(ids) + len(out) - 1) for _ in range(LAYERS) for x in selection(t)]
            meta["indexer_topk"] = base64.b64encode(struct.pack(f"<{len(rows)}i", *rows)).decode()
        self.answer({"output_ids": out, "meta_info": meta})


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
"""


def engine_diff(name: str, old: str, new: str) -> str:
    number = ENGINE.splitlines().index(old) + 1
    return f"--- a/sglang/{name}\n+++ b/sglang/{name}\n@@ -{number},1 +{number},1 @@\n-{old}\n+{new}\n"


def test_kl_is_zero_only_for_equal_rows_and_is_that_of_the_textbook() -> None:
    p = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], dtype=np.float32))
    q = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], dtype=np.float32))
    assert divergence.kl(p, p).tolist() == [0.0, 0.0]
    assert divergence.kl(p, q)[1] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)


def test_kl_refuses_a_truncated_distribution() -> None:
    full = divergence.dense([[-1.0, 0, None], [-0.5, 1, None]], 2)
    short = divergence.dense([[-1.0, 0, None]], 2)
    with pytest.raises(ValueError, match="missing"):
        divergence.kl(full[None], short[None])


def test_dense_puts_each_logprob_at_its_token() -> None:
    assert divergence.dense([[-0.5, 2, None], [-2.0, 0, "a"], [-3.0, 1, None]], 3).tolist() == [-2.0, -3.0, -0.5]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8))
def test_the_selection_comes_back_by_token_layer_and_rank(num_rows: int, layers: int, k: int) -> None:
    sent = np.arange(num_rows * layers * k, dtype=np.int32).reshape(num_rows, layers, k)
    encoded = base64.b64encode(sent.tobytes()).decode()
    assert (divergence.decode_topk(encoded, k, num_rows) == sent).all()
    with pytest.raises(ValueError, match="whole number"):
        divergence.decode_topk(encoded, k, num_rows * layers * k + 1)


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_overlap_is_of_sets_whatever_the_order_and_the_padding(a: set[int], b: set[int], pad: int) -> None:
    left = np.array([*a, *[-1] * pad], dtype=np.int32)
    right = np.array([*[-1] * pad, *sorted(b, reverse=True)], dtype=np.int32)
    assert divergence.overlap(left, right) == pytest.approx(len(a & b) / len(a))


def test_rows_of_a_densely_prefilled_prompt_are_left_out() -> None:
    short = divergence.rows_to_keep(1024, 1039, 2048, 2048)
    assert short["below"] == [] and short["above"] == [] and short["decode"] == list(range(1024, 1039))
    long = divergence.rows_to_keep(4096, 4111, 2048, 2048)
    assert max(long["below"]) == 2047 and min(long["above"]) == 2048 and max(long["above"]) == 4095


def test_rank_p_counts_every_way_to_draw_the_ranks() -> None:
    assert divergence.rank_p([3.0, 4.0], [1.0, 2.0], two_sided=False) == pytest.approx(1 / 6)
    assert divergence.rank_p([3.0, 4.0], [1.0, 2.0], two_sided=True) == pytest.approx(1 / 3)
    assert divergence.rank_p([0.0, 0.0], [0.0, 0.0], two_sided=False) == 1.0
    assert divergence.rank_p([], [1.0], two_sided=False) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_rank_p_is_the_share_of_relabellings_at_least_as_far(values: list[int], floor: list[int]) -> None:
    pooled = [*values, *floor]
    ranks = [sum(x < v for x in pooled) + (pooled.count(v) + 1) / 2 for v in pooled]
    sums = [sum(ranks[i] for i in drawn) for drawn in itertools.combinations(range(len(pooled)), len(values))]
    expected = sum(total >= sum(ranks[: len(values)]) for total in sums) / len(sums)
    found = divergence.rank_p([float(v) for v in values], [float(v) for v in floor], two_sided=False)
    assert found == pytest.approx(expected)


def test_a_selection_shows_only_beyond_what_base_again_misses() -> None:
    def said(*shared: float) -> list[dict[str, object]]:
        values = dict.fromkeys(("prefill", "decode", "prefill_decode", "cold_warm"), 0.0)
        return [{**values, "overlap_below": [1.0, 1.0], "overlap_above": list(shared)}]

    compared = {
        "base": {"4096": said(1.0, 1.0)},
        "base-again": {"4096": said(1.0, 0.98)},
        "keys": {"4096": said(0.999, 0.97)},
        "later": {"4096": said(1.0, 0.9)},
        "noop": {"4096": said(1.0, 0.975)},
    }
    told = divergence.conclude(compared, 2048)
    assert told["keys"]["selection"]["layers"] == [0]
    assert told["later"]["selection"]["layers"] == [1]
    assert told["noop"]["selection"]["shows_above"] is False and told["noop"]["selection"]["shows_below"] is False


def test_each_patch_shows_where_it_acts_and_nowhere_else(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang/__init__.py").write_text("")
    (site / "sglang/launch_server.py").write_text(ENGINE)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 32, "index_topk": 44}))
    (tmp_path / "selection.diff").write_text(engine_diff("launch_server.py", "SELECTION = 0", "SELECTION = 1"))
    (tmp_path / "logits.diff").write_text(engine_diff("launch_server.py", "LOGITS = 0.0", "LOGITS = 0.5"))
    (tmp_path / "set.toml").write_text(
        'engine = "sglang"\nonset_tokens = 44\n[[patch]]\nid = "selection"\ndiffs = ["selection.diff"]\n'
        '[[patch]]\nid = "logits"\ndiffs = ["logits.diff"]\n[[patch]]\nid = "noop"\nenv = { NOOP = "1" }\n'
    )
    # 12 prompt and 16 generated tokens stay below the onset, 80 are above it.
    port = 20000 + os.getpid() % 20000
    command = [
        sys.executable, "-m", "longrecall.runners.h200", str(tmp_path / "set.toml"), "--site", str(site),
        "--model", str(model), "--out", str(tmp_path / "table.json"), "--work", str(tmp_path / "work"),
        "--lengths", "12", "80", "--prompts", "7", "--port", str(port), "--deadline-s", "50",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["builds"]["selection"]["changed"] == ["sglang/launch_server.py"]
    assert (site / "sglang/launch_server.py").read_text() == ENGINE  # hard links: the base must not change
    told = table["concluded"]
    for side in ("below", "above"):
        assert told["base-again"]["prefill"][side]["largest"] == 0 == told["base-again"]["decode"][side]["largest"]
        assert not any(told["noop"][measure][side]["shows"] for measure in ("prefill", "decode", "cold_warm"))
        assert told["logits"]["prefill"][side]["shows"] and not told["logits"]["prefill_decode"][side]["shows"]
    assert told["selection"]["prefill"]["above"]["shows"] and not told["selection"]["prefill"]["below"]["shows"]
    assert told["selection"]["selection"]["shows_above"] and not told["selection"]["selection"]["shows_below"]
    assert not told["logits"]["selection"]["shows_above"]
    first = table["compared"]["selection"]["80"][0]
    assert first["overlap_below"] == [1.0, 1.0] and max(first["overlap_above"]) < 1
    assert first["cached_tokens"] == [0, 68, 0]


def test_an_engine_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang/__init__.py").write_text("")
    (site / "sglang/launch_server.py").write_text("raise SystemExit('no GPU here')\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 32, "index_topk": 8}))
    (tmp_path / "set.toml").write_text('engine = "sglang"\n[[patch]]\nid = "noop"\nenv = { NOOP = "1" }\n')
    done = subprocess.run(
        [sys.executable, "-m", "longrecall.runners.h200", str(tmp_path / "set.toml"), "--site", str(site), "--model",
         str(model), "--out", str(tmp_path / "t.json"), "--work", str(tmp_path / "work"), "--deadline-s", "30"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and "build base: ended with 1" in done.stderr
    assert "no GPU here" in json.loads((tmp_path / "t.json").read_text())["builds"]["base"]["log"]


def test_the_page_says_what_the_committed_tables_hold() -> None:
    spec = importlib.util.spec_from_file_location("sglang_h200", ROOT / "docs/benchmarks/sglang_h200.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tables = json.loads((ROOT / "docs/benchmarks/sglang_h200.json").read_text())
    assert script.page(tables, script.TEMPLATE) == (ROOT / "docs/benchmarks/sglang_h200.md").read_text()
    # The finding that everything else rests on: below the onset, index patches change nothing at all.
    told = divergence.conclude(tables["sglang-h200"]["compared"], 2048)
    for patch in ("index-rotation-one-sided", "index-keys-bf16", "noop"):
        assert told[patch]["prefill"]["below"]["largest"] == 0 == told[patch]["decode"]["below"]["largest"]


@pytest.mark.slow
def test_the_diffs_apply_exactly_to_the_released_tree(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.11",
         "--platform", "manylinux_2_34_x86_64", "-d", str(tmp_path), "sglang==0.5.17"],
        check=True, timeout=600,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("sglang-0.5.17-*.whl")
    for file in PATCHSETS:
        patchset = load_patchset(file)
        for patch in patchset.patches:
            tree = tmp_path / f"{patchset.name}-{patch.patch_id}"
            names = ["sane-dummy-weights", *(["v4-captured-selection"] if patchset.name.endswith("v4") else [])]
            shared = [(name, (ROOT / f"patchsets/patches/sglang-h200-{name}.diff").read_text()) for name in names]
            for name, text in (*shared, *read_diffs(patchset, patch)):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(
                        tree,
                        [n for n in archive.namelist() if f"+++ b/{n}\n" in text and not (tree / n).exists()],
                    )
                for changed in apply_diff(tree, text, name):
                    compile((tree / changed).read_text(), changed, "exec")
