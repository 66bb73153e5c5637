"""Puts the compiled kernels into wheels; pyproject.toml has everything else.

Without a compiler that works the wheel is one of Python alone, which compiles the kernels at first use.
"""

import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from forerun.kernels.build import NoKernels, compile_all, compiler, platform_tag


class KernelWheel(bdist_wheel):
    """A wheel for any Python 3 on one platform, with the libraries of all its processors in forerun/kernels/lib."""

    kernels_tag: str | None = None  # and in editable installations, which never run this

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                command = compiler()
                print("Compiling the kernels, which takes a minute or two ...", file=sys.stderr, flush=True)
                libraries = compile_all(Path(folder), command)
            except NoKernels as reason:
                print(f"The wheel carries no compiled kernels: {reason}", file=sys.stderr)
                libraries = []
            if libraries:
                self.kernels_tag = platform_tag(libraries, command)
                self.root_is_pure = False
                self.distribution.has_ext_modules = lambda: True  # which decides where setuptools collects the files
                place = Path(self.get_finalized_command("build").build_lib) / "forerun" / "kernels" / "lib"
                place.mkdir(parents=True, exist_ok=True)
                for library in libraries:
                    self.copy_file(str(library), str(place / library.name))
            super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", self.kernels_tag) if self.kernels_tag else super().get_tag()


setup(cmdclass={"bdist_wheel": KernelWheel})
