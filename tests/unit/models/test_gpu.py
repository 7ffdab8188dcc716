"""A full GPU is told as such, whoever found it full."""

import pytest
import torch

from openbook.errors import StartupError
from openbook.models.gpu import told_if_gpu_full


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        torch.AcceleratorError("CUDA error: out of memory\nmore"),  # of what takes memory past torch's allocator
    ],
)
def test_a_full_memory_is_told_in_a_line_whoever_found_it_full(error: RuntimeError) -> None:
    with (
        pytest.raises(StartupError, match=r"^it is full: CUDA .*out of memory.*$"),
        told_if_gpu_full(StartupError, "it is full"),
    ):
        raise error


def test_what_else_fails_is_not_called_a_full_memory() -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError) as raised, told_if_gpu_full(StartupError, "it is full"):
        raise error
    assert raised.value is error
