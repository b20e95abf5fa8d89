"""By what two runs of a script are known to be alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.fingerprint import CommandFingerprint, fingerprint_of

PYTHON = "/home/alice/venv/bin/python3.11"


def shape(command: str, cwd: str = "/home/alice") -> CommandFingerprint:
    found = fingerprint_of(command.split(), cwd)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py --lr 0.1", "python train.py --lr 0.2"),
        ("python train.py --lr=0.1 --big", "python3 ./train.py --big --lr 7"),
        (f"{PYTHON} -u train.py", "python /home/alice/train.py"),
        ("python train.py --shift -3 data/a.csv", "python train.py --shift -4 data/b.csv"),
        ("torchrun --nproc-per-node 2 train.py -v", "torchrun train.py -v"),
        ("bash sweep.sh 3", "bash sweep.sh 4"),
    ],
)
def test_runs_that_differ_in_values_are_alike_and_not_the_same(one: str, other: str) -> None:
    assert shape(one).similar_key == shape(other).similar_key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py", "python eval.py"),
        ("python train.py", "python train.py --big"),
        ("python main.py train", "python main.py eval"),
        ("python -m pk.train", "python -m pk.eval"),
        ("python a.py b.py", "python b.py a.py"),
        ("bash train.sh", "bash eval.sh"),
    ],
)
def test_runs_of_other_scripts_or_with_other_options_are_not_alike(one: str, other: str) -> None:
    assert shape(one).similar_key != shape(other).similar_key


def test_a_script_of_another_folder_is_another_script() -> None:
    assert shape("python train.py", "/a").similar_key != shape("python train.py", "/b").similar_key
    assert shape("python -m train", "/a").similar_key != shape("python -m train", "/b").similar_key


def test_runs_are_the_same_only_if_every_word_is() -> None:
    assert (
        shape("python train.py --lr 0.1").exact_key == shape("python train.py --lr 0.1").exact_key
    )
    assert (
        shape("python train.py --lr 0.1").exact_key != shape("python train.py --lr 0.2").exact_key
    )


@pytest.mark.parametrize("command", ["python -c print(1)", "python", "python -", "bash -c x"])
def test_what_names_no_script_has_no_shape(command: str) -> None:
    assert fingerprint_of(command.split(), "/") is None


@given(st.lists(st.text(max_size=8), max_size=6), st.text(max_size=8))
def test_any_command_has_a_shape_or_none_and_tells_nothing_of_itself(
    argv: list[str], cwd: str
) -> None:
    found = fingerprint_of(argv, cwd)

    assert found is None or (len(found.similar_key), len(found.exact_key)) == (32, 32)
    assert found == fingerprint_of(argv, cwd)
