"""Number formats, bit by bit."""

from pathlib import Path

import pytest
import torch

from weft.explain.precision import precision


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa"),
    [("fp32", 8, 23), ("fp16", 5, 10), ("bf16", 8, 7), ("fp8 e4m3", 4, 3), ("fp8 e5m2", 5, 2), ("int8", 0, 7)],
)
def test_bits(name: str, exponent: int, mantissa: int) -> None:
    (found,) = [each for each in precision(0).formats if each.name == name]
    assert (found.exponent, found.mantissa) == (exponent, mantissa)
    assert len(found.parts) == found.bits == 1 + exponent + mantissa


def test_ranges_are_those_of_torch() -> None:
    formats = {each.name: each for each in precision(0).formats}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        smallest = torch.tensor(formats[name].tiniest, dtype=torch.float64)
        assert smallest.to(dtype) > 0 and (smallest / 2.1).to(dtype) == 0  # nothing is between it and 0
        assert torch.tensor(formats[name].largest).to(dtype).isfinite()
    assert formats["fp8 e4m3"].largest == 448


def test_weights_and_figure(tmp_path: Path) -> None:
    picture = precision(1 << 20)
    rows = {row[0]: row[-1] for row in picture.tables()[0].rows}
    assert rows["fp32"] == "4 MiB" and rows["bf16"] == "2 MiB" and rows["int8"] == "1 MiB"
    assert picture.save(tmp_path / "formats.svg").stat().st_size > 1000
