from pathlib import Path

import pytest
import torch

from longrecall.kernels.indexer import hadamard, index_topk, measures
from longrecall.kernels.indexer.capture import CaptureError, CaptureWriter, attach, read_capture
from longrecall.kernels.indexer.emulate import Pipeline, select
from longrecall.kernels.indexer.presets import preset
from longrecall.kernels.indexer.sweep import arms_of, sweep_captures
from longrecall.kernels.indexer.synthetic import synthetic


class ServedIndexer:
    """As a model has it: rotated keys of the context so far, `select` called once per chunk."""

    def select(self, q, keys, weights, visible):
        return index_topk(q, keys, weights, 512, visible=visible)


def serve_in_chunks(path: Path, *, wanted: frozenset[int] | None = None) -> tuple[Path, torch.Tensor]:
    chosen = preset("reference")
    indexers = {5: ServedIndexer(), 11: ServedIndexer()}
    writer = CaptureWriter(path=path, preset="reference", model="test", wanted=wanted)
    detach = attach(writer, indexers)
    g = torch.Generator().manual_seed(0)
    total, needles = 900, torch.tensor([[17, 18]])
    for layer in indexers.values():
        q, keys = torch.randn(total, 8, 128, generator=g), torch.randn(total, 128, generator=g)
        weights = torch.rand(total, 8, generator=g) * chosen.weight_scale
        keys[17:19] = q[-1].mean(0) * 8
        for start in range(0, total, 250):
            part = slice(start, min(start + 250, total))
            layer.select(hadamard(q[part]), hadamard(keys[: part.stop]), weights[part], torch.arange(total)[part] + 1)
    detach()
    assert "select" not in vars(indexers[5])
    return writer.close(needles=needles if wanted else None), keys


def test_a_served_context_comes_back_layer_by_layer(tmp_path: Path) -> None:
    path, last_keys = serve_in_chunks(tmp_path / "a.safetensors", wanted=frozenset({899}))
    layers = dict(read_capture(path))
    assert sorted(layers) == [5, 11]
    got = layers[11]
    assert got.q.shape == (1, 8, 128) and got.positions.tolist() == [899]
    torch.testing.assert_close(got.keys, last_keys, rtol=0, atol=1e-5)
    assert got.foreign_keys is not None and torch.equal(got.foreign_keys, layers[5].keys)
    healthy, broken = select(got, Pipeline(key_format="fp8")), select(got, Pipeline(rotate="q"))
    assert float(measures.needle_hit(healthy, got.needles)) == 1
    assert float(measures.set_recall(broken, select(got, Pipeline()))) < 0.75  # chance is 512 / 900


def test_every_query_is_kept_when_none_is_named(tmp_path: Path) -> None:
    path, _ = serve_in_chunks(tmp_path / "b.safetensors")
    assert next(iter(read_capture(path)))[1].positions.tolist() == list(range(900))


def test_a_capture_is_swept_like_synthetic_activations(tmp_path: Path) -> None:
    path, _ = serve_in_chunks(tmp_path / "c.safetensors", wanted=frozenset({899}))
    rows = list(sweep_captures([path], arms_of(["bf16", "fp8"], [], "bf16")))
    assert [(row.layer, row.arm) for row in rows] == [(5, "bf16"), (5, "fp8"), (11, "bf16"), (11, "fp8")]
    assert all(row.tokens == 900 and row.needle_hit == 1 for row in rows)


def test_empty_torn_and_foreign_files_are_named(tmp_path: Path) -> None:
    writer = CaptureWriter(path=tmp_path / "d.safetensors", preset="reference")
    with pytest.raises(CaptureError, match="no layer was captured"):
        writer.close()
    with pytest.raises(CaptureError, match="no such capture file"):
        next(read_capture(tmp_path / "absent.safetensors"))
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "e.safetensors"))
    with pytest.raises(CaptureError, match="capture format None"):
        next(read_capture(tmp_path / "e.safetensors"))
    assert list(tmp_path.glob("*.tmp")) == []


def test_synthetic_needles_score_where_they_were_asked_to() -> None:
    given = synthetic(preset("v4-flash"), 40_000, generator=torch.Generator().manual_seed(1), needle_sigma=3.0)
    from longrecall.kernels.indexer.emulate import scores

    table = scores(given, Pipeline())
    level = (table - table.mean(1, keepdim=True)) / table.std(1, keepdim=True)
    torch.testing.assert_close(level.gather(1, given.needles.long()), torch.full((8, 2), 3.0), rtol=0, atol=0.1)


def test_the_same_seed_gives_the_same_activations() -> None:
    made = [synthetic(preset("reference"), 600, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(made[0].keys, made[1].keys) and torch.equal(made[0].q, made[1].q)
