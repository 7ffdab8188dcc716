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
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):  # CUDA's own is one, too
            raise
        raise raised(f"{what}: {str(error).partition(chr(10))[0]}") from None
