"""Notebooks that are refused before they are queued."""

import json
from pathlib import Path

import pytest

from gpulease.cli.command_check import refuse_notebook
from gpulease.errors import CommandNotExecutable

NOTEBOOK = json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []})


def test_a_notebook_and_a_new_file_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(NOTEBOOK)
    for words in ([], ["-o", "b.ipynb"], ["--output=b.ipynb"]):
        refuse_notebook("a.ipynb", words, tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"nbformat": 2}', '{"nbformat": 4}'])
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.ipynb").write_text(content)
    with pytest.raises(CommandNotExecutable):
        refuse_notebook("a.ipynb", [], tmp_path)


@pytest.mark.parametrize("output", ["none/b.ipynb", "."])
def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "a.ipynb").write_text(NOTEBOOK)
    with pytest.raises(CommandNotExecutable):
        refuse_notebook("a.ipynb", ["--output", output], tmp_path)
