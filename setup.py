"""Adds the configurations to the wheel, as mmrl/configs; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies configs/ into the package, except in an editable installation, which reads the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "mmrl", "configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
