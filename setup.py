"""What pyproject.toml cannot say: `configs/`, beside the package in a clone, lies inside it where it is installed."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["pycls_fast*"]), "pycls_fast.configs"],
    package_dir={"pycls_fast.configs": "configs"},
)
