"""Every model family through every conversion and back, killed in the middle of both ways and started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.checkpoints import to_torch_dist
from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences
from slime.weights.hf import writer as hf_writer
from slime.weights.quantization import Format, Fp8, Int4
from slime.weights.quantization.files import quantize_checkpoint, to_bf16
from tests.support.distributed import run_distributed
from tests.support.model_families import DENSE, FAMILIES, make_checkpoint
from tests.unit.weights.quantization.test_files import split, tensors_of

FILES = 3
RULES = ("re:.*mtp.*",)  # too small here
FORMS: dict[str, tuple[Format, float]] = {  # and the largest error, over the largest weight
    "fp8": (Fp8((16, 16), "block"), 1 / 16), "fp8-tensor": (Fp8(), 1 / 16), "int4": (Int4(8), 1 / 12),
    "int4-asymmetric": (Int4(8, symmetric=False), 1 / 6),
}  # fmt: skip


def killed_and_started_again(
    work: Callable[[], object],
    out: Path,
    patch: pytest.MonkeyPatch,
    writer: tuple[ModuleType, str, str] = (hf_writer, "write_tensors", ".unfinished"),
) -> None:
    """Do ``work``, which is killed at its second file, and once more; no file is written twice.

    ``writer``: the module and function that write a file, and what its name ends in until it is whole.
    """
    module, function, unfinished = writer
    write, written = getattr(module, function), []

    def write_file(path: Path, *what: Any) -> Any:
        if len(written) == 1:
            written.append("killed")
            path.with_name(f"{path.name}{unfinished}").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *what)

    with patch.context() as patched:
        patched.setattr(module, function, write_file)
        with pytest.raises(KeyboardInterrupt):
            work()
        assert not out.exists()
        work()
    assert len(written) == len(set(written)) >= FILES


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_and_in_bf16_again(name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quantized, bound), source = FORMS[form], Path(make_checkpoint(tmp_path, name))
    split(source, FILES)
    made, again = tmp_path / "made", tmp_path / "again"
    killed_and_started_again(lambda: quantize_checkpoint(source, made, quantized, RULES), made, monkeypatch)
    killed_and_started_again(lambda: to_bf16(made, again), again, monkeypatch)
    weights, found = tensors_of(source), tensors_of(again)
    assert weights.keys() == found.keys()
    changed = [n for n, weight in weights.items() if not torch.equal(found[n], weight)]
    assert len(changed) >= 10
    for n in changed:
        assert n.endswith(".weight")
        assert (found[n].float() - weights[n].float()).abs().max() <= weights[n].float().abs().max() * bound, n


@pytest.mark.parametrize("name", FAMILIES)
def test_as_megatron_stores_it_and_in_hugging_face_s_form_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, megatron, out = Path(make_checkpoint(tmp_path, name)), tmp_path / "megatron", tmp_path / "out"
    split(source, FILES)
    writer = (to_torch_dist, "write_entries", "")
    killed_and_started_again(lambda: to_torch_dist.to_torch_dist(source, megatron), megatron, monkeypatch, writer)
    has_vision = bool(FAMILIES[name].whole)
    conversion = Conversion(megatron, out, source, add_missing=has_vision, chunk_bytes=20_000)
    killed_and_started_again(lambda: convert(conversion), out, monkeypatch)
    assert differences(out, source) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all families, and beside each what two trainer ranks have saved of it."""
    folder = tmp_path_factory.mktemp("families")
    checkpoints = {name: make_checkpoint(folder, name) for name in FAMILIES}
    cases = {name: ("tp2",) if name in DENSE else ("ep2",) for name in FAMILIES}
    run_distributed(
        "tests.support.convert_ranks:save_all", 2, {"checkpoints": checkpoints, "cases": cases}, timeout=600
    )
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_loaded_saved_and_in_hugging_face_s_form_again(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, out = "tp2" if name in DENSE else "ep2", tmp_path / "out"
    carried = bool(FAMILIES[name].carried)
    conversion = Conversion(saved / f"{name}-{layout}", out, saved / name, add_missing=carried, chunk_bytes=20_000)
    killed_and_started_again(lambda: convert(conversion), out, monkeypatch)
    assert differences(out, saved / name) == []
