"""The settings file: what is otherwise for users and groups, and what is refused."""

from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.config import QUEUE_KEYS, Settings, read_settings, renew
from gpulease.daemon.app import checked, queue_policy
from gpulease.daemon.user_policy import without_effect
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.errors import BadConfiguration
from gpulease.units import GIB


def read(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return read_settings(path, Settings(), {})


def test_users_and_groups_have_settings_of_their_own(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        overuse_grace = "1m"
        [users.alice]
        overuse = "warn"
        overuse_tolerance = "1G"
        most_gpus = "none"
        [groups."domain users"]
        elastic = true
        idle = "release"
        [groups.guests]
        overuse_tolerance = 0
        [groups.guests.together]
        most_memory = "96G"
        most_gpus = "none"
        """,
    )

    assert settings.overuse_grace == timedelta(minutes=1)
    alice = {"overuse": "warn", "overuse_tolerance": GIB, "most_gpus": None}
    assert settings.users == {"alice": alice}
    assert settings.groups == {
        "domain users": {"elastic": True, "idle": "release"},
        "guests": {
            "overuse_tolerance": 0,
            "together": {"most_memory": 96 * GIB, "most_gpus": None},
        },
    }


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ('overuse = "kill"', "overuse: 'kill' is not a valid value", '"warn" or "stop"'),
        ('overuse_tolerance = "300"', "'300': it has no unit", "did you mean 300M?"),
        ('overuse_tolerence = "1G"', "an unknown key", "did you mean overuse_tolerance?"),
        ("elastic = true\nelastic = false\nidle = 1", "line 2", None),
        ("[[x]]\na = 1\n[[x]]\na = 1\nbad bad", "line 5", None),
        ("most_waiting = " + "1" * 5000, "limit", None),
        ("margin = " + "[" * 20_000, "recursion", None),
        ('[users.alice]\nsocket = "/x"', "[users.alice] has an unknown key 'socket'", "known keys"),
        ('[users]\noveruse = "warn"', "users is a table", "[users.NAME]"),
        (
            '[groups.a]\noveruse_grace = "2d"',
            "[groups.a] overuse_grace: cannot use the grace",
            "1h",
        ),
        ('[groups.a.together]\nidle = "warn"', "unknown key 'idle'", "known keys"),
        ("[users.a.together]\nmost_gpus = 3", "[users.a] has an unknown key 'together'", None),
        ('[users.alice]\noveruse = ["warn"]', "write [users.alice] overuse", None),
        ("[user.alice]", "an unknown key 'user'", "users"),
        ("queue = 3", "queue is a table", "[queue]"),
        ('[queue]\npolicy = "lifo"', "[queue] policy: 'lifo'", '"fifo"'),
        ('[users.a]\nmost_gpus = "many"', "[users.a] most_gpus: 'many'", "digits"),
    ],
)
def test_what_cannot_be_understood_is_named(
    tmp_path: Path, text: str, says: str, hint: str | None
) -> None:
    with pytest.raises(BadConfiguration) as refused:
        read(tmp_path, text)
    assert says in refused.value.message
    assert hint is None or hint in (refused.value.hint or "")


def test_a_reload_takes_over_what_is_otherwise_for_users(tmp_path: Path) -> None:
    fresh = read(tmp_path, '[users.alice]\noveruse = "warn"')
    settings, taken, left = renew(Settings(), fresh)

    assert (taken, left) == (["users"], [])
    assert settings.users == fresh.users


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration) as refused:
        read(tmp_path, 'elastic = 3\nmargin = "10%"\ngrace = "1m"\ntint = "red"')
    first, *told = refused.value.message.splitlines()
    assert "3" in first
    assert [each.split()[0] for each in told[:4]] == ["elastic:", "hint:", "margin:", "hint:"]
    assert len(told) == 6
    assert mentions(told[1], "true", "false")
    assert "tint" in told[4]
    assert mentions(told[5], "socket, state, ")
    assert refused.value.hint is None


def test_the_options_of_run_belong_in_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('overuse = "warn"\n[run]\ngrowth = true\n')

    assert read_settings(path, Settings(), {}, is_users=True).overuse == "warn"
    with pytest.raises(BadConfiguration, match=r"\[run\]"):
        read_settings(path, Settings(), {})


def test_mistakes_in_several_tables_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration) as refused:
        read(tmp_path, '[users.a]\nidle = 1\nelastic = 2\n[groups.b]\ncolour = "red"')
    for where in ("[users.a] idle:", "[users.a] elastic:", "[groups.b] has"):
        assert where in refused.value.message


def test_a_file_of_many_megabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="the limit is 4M"):
        read(tmp_path, "# much text\n" * 400_000)


def test_a_default_below_the_smallest_lease_is_refused(tmp_path: Path) -> None:
    checked(read(tmp_path, 'default_memory = "1G"\nsmallest_lease = "1G"'))
    checked(read(tmp_path, 'default_memory = "5%"\nsmallest_lease = "1G"'))
    with pytest.raises(BadConfiguration, match="default_memory"):
        checked(read(tmp_path, 'default_memory = "512M"\nsmallest_lease = "1G"'))


def test_the_table_of_the_queue_has_a_key_for_each_number_of_the_policy(tmp_path: Path) -> None:
    numbers = {each.name for each in fields(QueuePolicy)} - {"name"}
    assert QUEUE_KEYS.keys() == numbers | {"policy"}

    settings = read(tmp_path, '[queue]\npolicy = "easy"\naging_jobs = 3\nmost_utilization = 1.5')

    policy = queue_policy(settings)
    assert (policy.name, policy.aging_jobs, policy.most_utilization) == (PolicyName.EASY, 3, 1.5)
    assert queue_policy(Settings()) == QueuePolicy()


def test_a_former_key_of_the_queue_is_warned_of_and_changes_nothing(tmp_path: Path) -> None:
    settings = read(tmp_path, "[queue]\nage_offset = 4\naging_jobs = 3")

    assert queue_policy(settings) == QueuePolicy(aging_jobs=3)
    assert without_effect(settings) == ["[queue] age_offset has no effect any more: remove it"]
    with pytest.raises(BadConfiguration, match="unknown key 'age_ofset'"):
        read(tmp_path, "[queue]\nage_ofset = 4")
