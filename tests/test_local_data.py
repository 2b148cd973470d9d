"""What can only be said of the benchmark files that `DENDRITIC_LAB_DATA` names. No other test sees them."""

import os
from fractions import Fraction
from pathlib import Path

import pytest

from dendritic_lab.data import load
from dendritic_lab.data.benchmarks import BENCHMARKS, available
from dendritic_lab.data.gsm8k import extract_answer
from dendritic_lab.data.language import text_tokenizer  # also adds the texts to BENCHMARKS

local = pytest.mark.local
HELD_LOCALLY = [name for name, benchmark in BENCHMARKS.items() if benchmark.local is not None]


def test_only_these_tests_see_the_users_data(): assert "DENDRITIC_LAB_DATA" not in os.environ


@pytest.fixture
def files():  # benchmark -> its splits from the user's folder, or the test is skipped
    def read(name: str, source: str = "local"):
        if why := available(name)["local"]: pytest.skip(why)
        return load(name, source=source)
    return read


@local
@pytest.mark.parametrize("name", HELD_LOCALLY)
def test_each_benchmark_is_read_from_its_files(files, name):
    read = files(name, "auto")
    assert read.record["source"] == "local" and {"train", "validation", "test"} <= read.keys()
    assert all(set(rows.column_names) == set(BENCHMARKS[name].columns) for rows in read.values())
    assert {split: len(rows) for split, rows in read.items()} == read.record["rows"]
    if BENCHMARKS[name].labels: assert set(read["train"]["label"]) == set(range(len(BENCHMARKS[name].labels)))


@local
def test_the_tokenizer_of_gpt_neox_is_taken_where_its_file_is_at_hand():
    if not Path(os.environ["DENDRITIC_LAB_DATA"], "tokenizers/gpt_neox_20B_tokenizer.json").is_file():
        pytest.skip("no tokenizer of GPT-NeoX")
    tokenizer = text_tokenizer()
    assert tokenizer.name_or_path == "gpt-neox-20b"
    assert tokenizer.decode(tokenizer("def f(x): return x\n")["input_ids"]) == "def f(x): return x\n"


@local
def test_each_reference_of_gsm8k_gives_the_number_that_is_written_there(files):
    references = [row["answer"] for split in files("gsm8k").values() for row in split]
    assert len(references) == 8792
    for reference in references:
        assert extract_answer(reference) == Fraction(reference.rsplit("#### ", 1)[1].replace(",", "").strip())
