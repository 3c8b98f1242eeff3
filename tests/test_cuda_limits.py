"""What the CUDA executor says of a GPU, and of a machine that has none it can use; on a stand-in for the driver."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from codegen.limits import target
from tests.fake_cuda import FakeCuda, open_executor
from tuner.errors import ToolchainError
from tuner.executors.cuda_context import Gpu, why_unavailable
from tuner.executors.cuda_limits import architecture, known, slug
from tuner.store import Store


def test_limits_come_from_the_device_and_rates_from_the_table(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    cuda = open_executor(monkeypatch, store, FakeCuda())
    assert (cuda.name, cuda.device, cuda.slug, cuda.rates) == ("cuda", "NVIDIA H200", "h200", "table")
    table = target("sm_90")
    assert cuda.limits.l2_bytes == 62914560
    for field in ("name", "arch", "sms", "shared_per_block", "shared_per_sm", "copy_tbps", "launch_us", "clock_ghz"):
        assert getattr(cuda.limits, field) == getattr(table, field), field


def test_rates_of_a_gpu_that_is_not_in_the_table_are_measured(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    fake = FakeCuda("NVIDIA H100 80GB HBM3")
    fake.call_ms = 0.05
    cuda = open_executor(monkeypatch, store, fake)
    assert (cuda.rates, cuda.slug, cuda.limits.name) == ("measured", "h100-80gb-hbm3", "H100 80GB HBM3")
    assert cuda.limits.launch_us == pytest.approx(50.0)
    assert cuda.limits.copy_tbps == pytest.approx(2 * (1 << 27) / 50e-6 / 1e12)
    assert not fake.allocated and fake.depth == 0


@pytest.mark.parametrize(("name", "capability", "sms", "found"), [
    ("NVIDIA H200", (9, 0), 132, "H200"), ("NVIDIA H200", (9, 0), 114, None), ("NVIDIA GH200 480GB", (9, 0), 132, None),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, "RTX 5090"), ("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), 82, None),
    ("NVIDIA B200", (10, 0), 148, "B200"), ("NVIDIA A100-SXM4-80GB", (8, 0), 108, "A100")])
def test_the_table_is_for_the_very_same_gpu_only(name: str, capability: tuple[int, int], sms: int, found: str | None) -> None:
    limits = known(name, capability, sms)
    assert (limits.name if limits else None) == found


def test_architectures_and_folder_names() -> None:
    assert [architecture(pair) for pair in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 1))] == [
        "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_121a"]
    assert [slug(name) for name in ("NVIDIA H200", "NVIDIA GeForce RTX 5090", "NVIDIA A100-SXM4-80GB")] == [
        "h200", "rtx-5090", "a100-sxm4-80gb"]


# --- a machine that cannot ------------------------------------------------------------------------------------------


def test_p1_without_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(ToolchainError) as caught:
        Gpu(0)
    assert str(caught.value).startswith("PyCUDA cannot be used (")
    assert str(caught.value).endswith("); install the extra `cuda` on a machine with an NVIDIA driver")
    assert why_unavailable() == str(caught.value)


def test_p1_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()

    def fail() -> None:
        raise fake.driver.Error("cuInit failed: no CUDA-capable device is detected")

    fake.driver.init = fail
    monkeypatch.setitem(sys.modules, "pycuda", SimpleNamespace(driver=fake.driver))
    monkeypatch.setitem(sys.modules, "pycuda.driver", fake.driver)
    with pytest.raises(ToolchainError) as caught:
        Gpu(0)
    assert str(caught.value) == "the CUDA driver finds no GPU to use (no CUDA-capable device is detected (cuInit))"


def test_p1_a_gpu_without_nvcc(monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path) -> None:
    monkeypatch.setattr("tuner.toolchain._TOOLKITS", tmp_path)
    monkeypatch.setattr("tuner.toolchain._candidates", lambda *_: iter(()))
    with pytest.raises(ToolchainError, match="no nvcc that compiles for sm_90a was found"):
        open_executor(monkeypatch, store, FakeCuda())


def test_p1_no_such_gpu(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    open_executor(monkeypatch, store, FakeCuda())
    with pytest.raises(ToolchainError, match="there is no GPU 1; this machine has 1, counted from 0"):
        Gpu(1)
