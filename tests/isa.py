"""Tests as older processors would compute them, by pytest's own arguments: `make test-isa`.

Libraries choose kernels by the processor, and the last bits differ. In these environments they choose as on an older
one; what each says of itself shows that it does, or ends the run.
"""

import ctypes
import json
import os
import re
import subprocess
import sys

import faiss
import numba
import torch
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

NUMPY = [name for name in __cpu_dispatch__ if __cpu_features__[name]]  # of others NumPy warns
PROFILES = {
    "generic": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",  # on processors of AMD, MKL_ENABLE_INSTRUCTIONS changes nothing
        "NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY),
        "OPENBLAS_CORETYPE": "Nehalem",  # products of NumPy and FAISS
        "FAISS_SIMD_LEVEL": "NONE",
        "FAISS_OPT_LEVEL": "generic",  # where FAISS comes as one library for each level, the line above changes nothing
        "NUMBA_CPU_NAME": "generic",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in NUMPY if "512" in name or name == "X86_V4"),
        "OPENBLAS_CORETYPE": "Haswell",
        "FAISS_SIMD_LEVEL": "AVX2",
        "FAISS_OPT_LEVEL": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
    },
}
ONEDNN = {"SSE41": "Intel SSE4.1", "AVX2": "Intel AVX2"}


def expected(profile: dict[str, str]) -> dict[str, object]:
    """What `seen` returns where the profile took effect."""
    disabled = profile["NPY_DISABLE_CPU_FEATURES"].split()
    return {
        "torch": profile["ATEN_CPU_CAPABILITY"].upper(),
        "oneDNN": ONEDNN[profile["ONEDNN_MAX_CPU_ISA"]],
        "MKL": profile.get("MKL_CBWR", "OFF"),
        "NumPy": [name for name in NUMPY if name not in disabled],
        "OpenBLAS": [profile["OPENBLAS_CORETYPE"]],
        "FAISS": profile["FAISS_SIMD_LEVEL"],
        "Numba": profile["NUMBA_CPU_NAME"],
    }


def seen(environment: dict[str, str]) -> dict[str, object]:
    """What the libraries say of themselves in a process with this environment."""
    verbose = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, __file__, "--report"]
    said = subprocess.run(command, env=environment | verbose, stdout=subprocess.PIPE, text=True, check=True).stdout
    logged = {"MKL": r"CNR:(\w+)", "oneDNN": r"cpu,isa:(.+)"}
    found = {name: re.search(pattern, said) for name, pattern in logged.items()}
    return json.loads(said.splitlines()[-1]) | {name: match and match[1] for name, match in found.items()}


def report() -> None:
    """Print a line of JSON, after what MKL and oneDNN log of a computation."""
    numbers = torch.ones(8, 8)
    (numbers @ numbers).to_mkldnn()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "openblas" in line}
    said = {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "NumPy": NUMPY,
        "OpenBLAS": sorted({core_name(ctypes.CDLL(path)) for path in loaded}),
        "FAISS": faiss.SIMDConfig.get_level_name(),
        "Numba": numba.config.CPU_NAME,
    }
    print(f"\n{json.dumps(said)}")


def core_name(openblas: ctypes.CDLL) -> str:
    """The processor whose kernels were chosen."""
    name = "scipy_openblas_get_corename64_" if hasattr(openblas, "scipy_openblas_get_corename64_") else ""
    function = getattr(openblas, name or "openblas_get_corename")
    function.restype = ctypes.c_char_p
    return function().decode()


def run(name: str, arguments: list[str]) -> int:
    """Returns pytest's exit status."""
    profile = PROFILES[name]
    environment = {**os.environ, **profile}
    found, wanted = seen(environment), expected(profile)
    print(f"{name}: {found}", flush=True)
    if found != wanted:
        raise SystemExit(f"{name}: wanted {wanted}")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], env=environment).returncode


if __name__ == "__main__":
    if sys.argv[1:] == ["--report"]:
        report()
    else:
        sys.exit(max([run(name, sys.argv[1:]) for name in PROFILES]))
