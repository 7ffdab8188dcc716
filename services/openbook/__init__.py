"""openbook: retrieval-augmented generation (Lewis et al. 2020) as a distributed system with its own index tier."""

__version__ = "0.1.0"
