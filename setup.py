"""The compiled kernels. Everything else about the package is in pyproject.toml.

They are optional: where no C compiler is found, or it is not GCC or Clang, the package installs
without them, and plain torch takes over.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

KERNELS = Path("src/kvweave/kernels")


class BuildKernels(build_ext):
    """Builds with threads (OpenMP) where the compiler offers them, else without."""

    def build_extension(self, ext: Extension) -> None:
        plain = list(ext.extra_compile_args), list(ext.extra_link_args)
        ext.extra_compile_args.append("-fopenmp")
        ext.extra_link_args.append("-fopenmp")
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args, ext.extra_link_args = plain
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            # A library that ctypes loads; it has the name of a module so that importlib finds it.
            "kvweave.kernels._native",
            sources=sorted(map(str, KERNELS.glob("*.c"))),
            depends=sorted(map(str, KERNELS.glob("*.h"))),
            extra_compile_args=["-O3", "-std=gnu11", "-g0"],
            optional=True,
        )
    ],
)
