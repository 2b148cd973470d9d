"""What can only be said of the benchmark files that `DENDRITIC_LAB_DATA` names."""

from fractions import Fraction

import pytest

from dendritic_lab.data import load
from dendritic_lab.data.benchmarks import available
from dendritic_lab.data.gsm8k import extract_answer

pytestmark = pytest.mark.local


@pytest.mark.skipif(available("gsm8k")["local"] != "", reason="no local folder with GSM8K")
def test_each_reference_of_gsm8k_gives_the_number_that_is_written_there():
    references = [row["answer"] for split in load("gsm8k", source="local").values() for row in split]
    assert len(references) == 8792
    for reference in references:
        assert extract_answer(reference) == Fraction(reference.rsplit("#### ", 1)[1].replace(",", "").strip())
