"""Builds the native kernels beside the package, where there is a compiler.

They are plain C++ behind a C interface: no header of Python or torch is used, so that nothing is
fetched into an isolated build. Without a compiler the package installs all the same, and the engine
says what it lacks.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("perflab/csrc")
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma")
ISAS = {
    "plain": (),
    **(
        {"avx2": ("-mavx2", "-mfma"), "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16")}
        if X86
        else {}
    ),
}
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)


class BuildKernels(build_ext):
    """`kernels.cpp` once per instruction set, everything else once."""

    def build_extension(self, ext: Extension) -> None:
        extra = os.environ.get("PERFLAB_CFLAGS", "").split()  # such as -fsanitize=address,undefined
        kernels = str(SOURCES / "kernels.cpp")
        jobs = [(isa, kernels, (f"-DISA={isa}", *flags)) for isa, flags in ISAS.items()]
        jobs += [("common", source, ()) for source in ext.sources if source != kernels]

        def compile_one(job: tuple[str, str, tuple[str, ...]]) -> list[str]:
            name, source, flags = job
            return self.compiler.compile(
                [source],
                str(Path(self.build_temp) / name),
                extra_postargs=[*FLAGS, "-fPIC", *flags, *extra],
                depends=ext.depends,
            )

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = [one for several in pool.map(compile_one, jobs) for one in several]
        except CompileError:
            print(
                "perflab: the native kernels were not built, the engine will run through torch. They need a "
                "C++20 compiler (g++ 12 or newer, or clang); install one and reinstall perflab."
            )
            raise
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread", *extra], target_lang="c++"
        )

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    ext_modules=[
        Extension(
            "perflab._native",
            sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=["setup.py", *sorted(str(path) for path in SOURCES.glob("*.h"))],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
