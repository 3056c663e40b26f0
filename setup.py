"""Maps the folders at the repository's root into the `vlaforge` namespace; everything else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

TOP = ("kernels", "graphs", "runtime", "models", "data", "eval", "bench")

found = [
    f"{top}.{sub}" if sub else top
    for top in TOP
    for sub in ["", *find_namespace_packages(top, exclude=["samples", "samples.*"])]
]
setup(
    packages=[f"vlaforge.{name}" for name in found],
    package_dir={f"vlaforge.{top}": top for top in TOP},
    package_data={
        "": ["*.yaml", "*.json", "*.md", "*.c", "*.h", "py.typed"],
        "vlaforge.data": ["samples/**/*"],
        "vlaforge.models": ["**/*.yaml", "**/*.json", "**/*.md"],
    },
)
