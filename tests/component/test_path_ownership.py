"""Directories that somebody else made beforehand, or can change: the daemon does not use them."""

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.config import runtime_directory
from gpulease.errors import BadConfiguration, NoDaemon, StateUnusable
from gpulease.host.state_dir import StateDirectory
from gpulease.path_ownership import changeable, shaky
from gpulease.server.listener import listen
from gpulease.user_daemon import ensure

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it is about what root does")


def given_to(user: pwd.struct_passwd, path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, user.pw_uid, user.pw_gid)
    return path


def test_a_state_directory_that_a_user_made_is_refused_and_left_as_it_is(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    state = given_to(user, tmp_path / "state")
    with pytest.raises(StateUnusable, match=str(user.pw_uid)):
        StateDirectory(state)
    assert state.stat().st_mode & 0o777 == 0o700
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("name", ["jobs", "lock", "gpulease.db"])
def test_a_part_of_the_state_that_a_user_made_is_refused(
    tmp_path: Path, user: pwd.struct_passwd, name: str
) -> None:
    StateDirectory(tmp_path / "state").close()
    part = tmp_path / "state" / name
    part.rmdir() if part.is_dir() else part.unlink(missing_ok=True)
    if name == "jobs":
        given_to(user, part)
    else:
        part.symlink_to("/etc/passwd")
        os.lchown(part, user.pw_uid, user.pw_gid)
    with pytest.raises(StateUnusable, match=str(user.pw_uid)):
        StateDirectory(tmp_path / "state")


def test_a_state_directory_below_a_users_is_not_even_made(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    home = given_to(user, tmp_path / "home", 0o755)
    with pytest.raises(StateUnusable, match=str(user.pw_uid)):
        StateDirectory(home / "deep" / "state")
    assert list(home.iterdir()) == []


def test_a_folder_that_all_may_write_is_refused_and_one_like_tmp_is_not(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StateUnusable, match=str(shared)):
        StateDirectory(shared / "state")
    shared.chmod(0o1777)
    StateDirectory(shared / "state").close()


def test_a_link_of_a_user_to_what_is_roots_is_refused(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert shaky(link, 0) is None
    os.lchown(link, user.pw_uid, user.pw_gid)
    assert mentions(shaky(link, 0), f"{link} ", str(user.pw_uid))
    assert shaky(link / "state", 0) == shaky(link, 0)


def test_a_link_of_a_user_on_the_way_to_what_is_roots_is_refused(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    (tmp_path / "real").mkdir()
    home = given_to(user, tmp_path / "home")
    (home / "link").symlink_to(tmp_path / "real")
    first = tmp_path / "first"
    first.symlink_to("real/../home/link")
    assert mentions(shaky(first / "state", 0), f"{home} ", str(user.pw_uid))
    (tmp_path / "loop").symlink_to("loop")
    assert shaky(tmp_path / "loop", 0) is None


def test_the_folder_of_the_socket_must_be_roots(tmp_path: Path, user: pwd.struct_passwd) -> None:
    run = given_to(user, tmp_path / "run", 0o755)
    with pytest.raises(BadConfiguration, match=str(user.pw_uid)):
        listen(run / "s", to_all=True)
    assert list(run.iterdir()) == []


def test_a_link_where_the_socket_is_to_be_is_neither_followed_nor_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch(0o600)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    for target in (precious, tmp_path / "dead", tmp_path / "nowhere"):
        path = tmp_path / "s"
        path.symlink_to(target)
        with pytest.raises(BadConfiguration, match=str(path)):
            listen(path, to_all=True)
        assert path.is_symlink()
        path.unlink()
    assert precious.stat().st_mode & 0o777 == 0o600


def test_the_daemon_says_so_and_exits_with_78(tmp_path: Path, user: pwd.struct_passwd) -> None:
    for option, other in (("--state", "--socket"), ("--socket", "--state")):
        theirs = given_to(user, tmp_path / option[2:], 0o755)
        done = subprocess.run(
            [sys.executable, "-m", "gpulease.daemon", "--simulate", "1x8G",
             option, str(theirs / "it") if option == "--socket" else str(theirs),
             other, str(tmp_path / "fine" / "it")],
            capture_output=True, text=True, timeout=60, check=False, cwd="/",
        )  # fmt: skip
        assert done.returncode == 78, done
        assert mentions(done.stderr, str(theirs), str(user.pw_uid))
        assert "hint: " in done.stderr
        assert list(theirs.iterdir()) == []


def test_a_personal_daemon_refuses_the_folder_that_another_laid_in_tmp(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    tmp_path.chmod(0o1777)
    laid = given_to(user, tmp_path / "gpulease-0", 0o777)
    with pytest.raises(NoDaemon, match=str(user.pw_uid)):
        ensure(laid / "s", tmp_path / "state", lambda _: False, ["false"])
    with pytest.raises(BadConfiguration, match=str(user.pw_uid)):
        listen(laid / "s", to_all=False)
    assert list(laid.iterdir()) == []


def test_root_makes_nothing_in_a_home_that_the_environment_names(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    home = given_to(user, tmp_path / "home", 0o755)
    with pytest.raises(NoDaemon, match=str(user.pw_uid)):
        ensure(tmp_path / "run" / "s", home / ".local" / "state", lambda _: False, ["false"])
    assert list(home.iterdir()) == []


def test_the_runtime_directory_of_another_user_is_not_ours(
    tmp_path: Path, user: pwd.struct_passwd
) -> None:
    theirs = given_to(user, tmp_path / "run")
    assert runtime_directory({"XDG_RUNTIME_DIR": str(theirs)}) == Path("/tmp/gpulease-0")
    assert runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "gpulease"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "config.toml"
    file.write_text('margin = "1G"\n')
    return file


def checked(settings: Path) -> subprocess.CompletedProcess[str]:
    """Have a daemon look at its settings."""
    return subprocess.run(
        [sys.executable, "-m", "gpulease.daemon", "--check", "--simulate", "1x8G",
         "--config", str(settings)],
        capture_output=True, text=True, timeout=60, check=False, cwd="/",
    )  # fmt: skip


def test_settings_that_others_can_change_are_refused(
    settings: Path, user: pwd.struct_passwd
) -> None:
    assert checked(settings).returncode == 0
    for part, mode, owner, why in (
        (settings, 0o646, 0, str(settings)),
        (settings, 0o644, user.pw_uid, f"{user.pw_uid}"),
        (settings.parent, 0o777, 0, str(settings.parent)),
        (settings.parent, 0o755, user.pw_uid, f"{user.pw_uid}"),
    ):
        before = part.stat().st_mode & 0o7777
        part.chmod(mode)
        os.chown(part, owner, 0)
        done = checked(settings)
        assert done.returncode == 78, done
        assert mentions(done.stderr, str(settings), why)
        assert "hint: " in done.stderr
        part.chmod(before)
        os.chown(part, 0, 0)


def test_a_users_own_daemon_reads_their_settings_and_roots_and_no_one_elses(
    settings: Path, user: pwd.struct_passwd
) -> None:
    uid = user.pw_uid
    for owner, mode, why in (
        (0, 0o644, None),
        (uid, 0o664, None),
        (uid, 0o666, f"all users may write to {settings}"),
        (uid + 1, 0o644, f"{settings} belongs to user {uid + 1}"),
    ):
        os.chown(settings, owner, 0)
        settings.chmod(mode)
        assert changeable(settings, uid) == why
