"""Old builds of PyTorch without the gigabytes of CUDA that the index wants beside them.

The index has releases before the one of `constraints.txt` for Linux only as builds that link to CUDA. On a machine
without a GPU none of those libraries is ever called, but the loader wants them to be there: empty ones are enough.
"""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

#: What is small enough to be there for real.
SMALL = re.compile(r"Requires-Dist: (nvidia-cuda-(?:runtime|cupti|nvrtc)-cu12==[\d.]+)")
#: The libraries that are stood in for, and how their functions begin where these carry no version.
EMPTY = {
    "libcublas.so.12": "cublas(?!Lt)",
    "libcublasLt.so.12": "cublasLt",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.11": "cufft",
    "libcurand.so.10": "curand",
    "libcusolver.so.11": "cusolver",
    "libcusparse.so.12": "cusparse(?!Lt)",
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "(p?)nccl",
    "libcufile.so.0": "cuFile",
    "libnvshmem_host.so.3": "nvshmem",
    "libcuda.so.1": "cu[A-Z]",
}
#: Versions of functions that are not called as their library is.
VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}


def stand_in(environment: Path) -> list[str]:
    """Give the environment's PyTorch empty CUDA libraries, if it wants some; what is to be installed for real."""
    (site,) = (environment / "lib").glob("python3.*/site-packages")
    libraries = site / "torch" / "lib"
    if not (libraries / "libtorch_cuda.so").is_file():
        return []
    if sys.platform != "linux" or not (shutil.which("cc") and shutil.which("readelf")):
        sys.exit("the oldest PyTorch is a build for CUDA, and doing without CUDA takes cc and readelf")
    for name, functions in _functions(libraries).items():
        source, versions = libraries / "standin.c", libraries / "standin.map"
        source.write_text("".join(f"void *{function}(void) {{ return (void *)1; }}\n" for function in functions))
        version = next(filter(None, functions.values()), None)
        versions.write_text(f"{version} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={versions}"] if version else []
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *script]
        subprocess.run([*command, "-o", libraries / name, source], check=True)
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    small = [match[1] for line in lines if (match := SMALL.match(line))]
    heavy = re.compile("Requires-Dist: (nvidia|triton)")
    metadata.write_text("".join(line for line in lines if not heavy.match(line)), encoding="utf-8")
    return small


def _functions(libraries: Path) -> dict[str, dict[str, str | None]]:
    """By library, the functions that PyTorch wants of it, with the version under which it asks for them."""
    wanted: defaultdict[str, dict[str, str | None]] = defaultdict(dict, {name: {} for name in EMPTY})
    for library in libraries.glob("*.so*"):
        symbols = subprocess.run(["readelf", "-W", "--dyn-syms", library], capture_output=True, text=True).stdout
        for function, version in re.findall(r" UND (\w+)(?:@+([\w.]+))?", symbols):
            origin = VERSIONS.get(version, version)
            if origin in EMPTY:
                wanted[origin][function] = version
            elif not version:
                for name in (name for name, begin in EMPTY.items() if re.match(begin, function)):
                    wanted[name][function] = None
    return wanted
