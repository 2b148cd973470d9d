"""transformers' own common model tests pass for the models that its users load: DSN, perforated BERT, dendritic LM."""

import os
import subprocess
import sys

import pytest
import transformers

from dendritic_lab.data.sources import DataError, PackageFile, fetch

COMMON_TESTS = PackageFile(
    "transformers==5.23.0", "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
    ("tests/test_modeling_common.py",), "74b3013cddf122d41c97a25fa73f2c5cf5ba7e9494a5ee1a218e231b10d648bf")


def test_common_model_tests_of_transformers(root):
    pytest.importorskip("parameterized", reason="the common tests need the package parameterized (extra dev)")
    version = COMMON_TESTS.requirement.partition("==")[2]
    if transformers.__version__ != version:
        pytest.skip(f"the digest is that of transformers {version}, installed is {transformers.__version__}")
    try: file = fetch(COMMON_TESTS)
    except DataError as e: pytest.skip(str(e))
    # transformers' own markers are not ours, and its warnings are no errors
    command = [sys.executable, "-m", "pytest", "tests/common_models.py", "-q", "--tb=short", "-rf",
               "-o", "addopts=", "-o", "filterwarnings="]
    variables = os.environ | {"DENDRITIC_LAB_COMMON_TESTS": str(file), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-10_000:]
