"""What the settings say about one user: their own table, their groups', or what holds for all."""

import grp
import os
import pwd
from datetime import timedelta

from gpulease.config import Settings
from gpulease.daemon.user_policy import UserPolicy, groups_of
from gpulease.domain.idle import Release
from gpulease.domain.job import Owner
from gpulease.domain.limits import GroupLimits, UserLimits
from gpulease.domain.overuse import Consequence

ME = Owner(os.getuid(), os.getgid(), pwd.getpwuid(os.getuid()).pw_name)
MY_GROUP = grp.getgrgid(os.getgid()).gr_name
NOBODY = Owner(4_000_000, 4_000_001, "nobody-of-that-name")


def test_what_holds_for_all_holds_for_who_is_not_named() -> None:
    rules = UserPolicy(
        Settings(overuse="warn", overuse_tolerance=5, users={"someone": {"elastic": True}})
    )
    policy = rules.overuse(ME)
    assert (policy.consequence, policy.tolerance, policy.elastic) == (Consequence.WARN, 5, False)


def test_a_user_is_nearer_than_a_group_and_a_group_than_all() -> None:
    rules = UserPolicy(
        Settings(
            overuse_tolerance=1,
            groups={MY_GROUP: {"overuse_tolerance": 2, "overuse": "warn", "elastic": True}},
            users={ME.user: {"overuse_tolerance": 3}},
        )
    )
    policy = rules.overuse(ME)
    assert (policy.tolerance, policy.consequence, policy.elastic) == (3, Consequence.WARN, True)
    assert rules.overuse(NOBODY).tolerance == 1


def test_of_two_groups_the_first_in_the_file_counts() -> None:
    gid = os.getgid()
    both = {MY_GROUP: {"overuse_tolerance": 2}, "no-such-group": {"overuse_tolerance": 9}}
    assert UserPolicy(Settings(groups=both)).overuse(ME).tolerance == 2
    assert groups_of(Owner(NOBODY.uid, gid, NOBODY.user)) == {MY_GROUP}, "its own, if nothing else"


def test_the_limits_of_each_of_a_users_groups_count_and_none_is_no_limit() -> None:
    name = ME.user
    groups = {
        MY_GROUP: {"most_gpus": 2, "together": {"most_gpus": 8, "most_memory": None}},
        "no-such-group": {"together": {"most_gpus": 1}},
    }
    rules = UserPolicy(Settings(groups=groups, users={name: {"most_gpus": 4}}))
    limits = rules.limits(ME)
    assert limits.most_gpus == 4
    assert limits.groups == (GroupLimits(MY_GROUP, UserLimits(most_gpus=8)),)
    assert rules.limits(NOBODY).groups == ()
    rules.adopt(Settings(groups={MY_GROUP: {"together": {"most_gpus": None}}}))
    assert rules.limits(ME).groups == (), "after a reload"


def test_a_table_makes_the_watch_vary_only_where_it_says_otherwise_of_it() -> None:
    assert not UserPolicy(
        Settings(users={"a": {"elastic": True, "overuse": "stop"}})
    ).differ_on_overuse
    assert UserPolicy(Settings(users={"a": {"overuse": "warn"}})).differ_on_overuse
    assert UserPolicy(Settings(overuse="warn", groups={"g": {"overuse": "stop"}})).differ_on_overuse


def test_a_reload_counts_at_once() -> None:
    rules = UserPolicy(Settings())
    assert rules.idleness(ME).release is Release.WARN
    rules.adopt(Settings(idle="release", idle_after=timedelta(hours=1)))
    policy = rules.idleness(ME)
    assert (policy.release, policy.after) == (Release.RELEASE, timedelta(hours=1))
