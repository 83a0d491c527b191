"""The compiled kernels. Everything else about the package is in pyproject.toml.

They are optional: where no C compiler is found, or it is not GCC or Clang, the package installs
without them, and plain torch takes over.

They are a library that ctypes loads, not a module: they use nothing of Python. One build serves
every Python, and the tags of the file and of the wheel say so.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

KERNELS = Path("src/kvweave/kernels")


class BuildKernels(build_ext):
    """Builds with threads (OpenMP) where the compiler offers them, else without."""

    def get_ext_filename(self, fullname: str) -> str:
        """One name on every platform and for every Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        plain = list(ext.extra_compile_args), list(ext.extra_link_args)
        ext.extra_compile_args.append("-fopenmp")
        if sys.platform == "linux":
            # No OpenMP runtime is linked: torch's is there when this is loaded, and a wheel that
            # names the system's would run on few systems. Without one, loading fails at once.
            ext.extra_link_args.append("-Wl,-z,now")
        else:
            ext.extra_link_args.append("-fopenmp")
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args, ext.extra_link_args = plain
            super().build_extension(ext)


class BuildWheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": BuildWheel},
    ext_modules=[
        Extension(
            "kvweave.kernels._native",
            sources=sorted(map(str, KERNELS.glob("*.c"))),
            depends=sorted(map(str, KERNELS.glob("*.h"))),
            extra_compile_args=["-O3", "-std=gnu11", "-g0"],
            optional=True,
        )
    ],
)
