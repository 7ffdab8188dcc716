"""The parts of bench_gpu.py: each measures and checks one thing, and says what it found as tables and checks."""
