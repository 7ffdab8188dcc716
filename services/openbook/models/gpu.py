"""A GPU whose memory is full: what is said, in a line, to whom would only run into it again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openbook.errors import OpenbookError


@contextmanager
def told_if_gpu_full(raised: type[OpenbookError], what: str) -> Iterator[None]:
    """Raises an error of this type, with these words in front of torch's, if the body finds the memory full."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        why = str(error).partition("\n")[0]
        if "out of memory" not in why:  # AcceleratorError is any error of CUDA's
            raise
        raise raised(f"{what}: {why}") from None
