"""The verbs of `gpulease`: what each is for, and what does it without typer.

The command imports this at every start, for its parser, and for `gpulease --help`.
"""

from __future__ import annotations

from gpulease.cli import everyday_options
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulease.cli.everyday_options import Argument
    from gpulease.options import Option

EVERYDAY = "Every day"
JOBS, LOOK, CHANGE = "Jobs", "Look", "Change"
SHARE, ADMINISTER = "Share the machine", "Administer"


@record(frozen=True)
class Verb:
    """A verb: the function of its name in its module is its declaration for typer."""

    group: str
    summary: str
    brief: str = ""
    """What the help of all verbs says of those that are not for every day."""
    module: str = ""
    """Of the declaration; empty: it has the name of the verb."""
    quick: str = ""
    """What does it without typer: a module and its function; empty: typer reads the line."""


VERBS: Mapping[str, Verb] = {
    "run": Verb(EVERYDAY, "Run a command on leased GPU memory.", quick="run_job"),
    "status": Verb(
        EVERYDAY, "Show GPUs, leases and the queue.",
        module="show_verbs", quick="status_page.print_status",
    ),
    "list": Verb(EVERYDAY, "List jobs.", module="show_verbs", quick="list_page.print_list"),
    "show": Verb(
        EVERYDAY, "Show jobs in detail.", module="show_verbs", quick="show_jobs.print_jobs"
    ),
    "logs": Verb(
        EVERYDAY, "Print the output of jobs.",
        module="follow_verbs", quick="follow_jobs.print_logs",
    ),
    "attach": Verb(
        EVERYDAY, "Connect this terminal to a job.",
        module="follow_verbs", quick="follow_jobs.attach",
    ),
    "wait": Verb(
        EVERYDAY, "Wait for the end of jobs.",
        module="follow_verbs", quick="follow_jobs.wait_for_jobs",
    ),
    "cancel": Verb(
        EVERYDAY, "End jobs, and release leases.",
        module="job_verbs", quick="cancel_jobs.cancel_jobs",
    ),
    "extend": Verb(
        EVERYDAY, "Change the time limits of jobs.",
        module="job_verbs", quick="change_jobs.extend_jobs",
    ),
    "hold": Verb(
        EVERYDAY, "Lease GPU memory for this shell.",
        module="lease_verbs", quick="hold.hold_lease",
    ),
    "again": Verb(
        JOBS, "Submit an ended job once more.", "an ended job once more",
        module="job_verbs", quick="again.run_again",
    ),
    "adopt": Verb(
        JOBS, "Lease the memory that a running process uses.", "a process",
        module="lease_verbs",
    ),
    "kernel": Verb(
        JOBS, "Install Jupyter kernels that run as jobs.", "Jupyter"
    ),
    "top": Verb(LOOK, "Watch GPUs, jobs and the queue live.", "live"),
    "web": Verb(LOOK, "See and control your jobs in a browser.", "browser"),
    "history": Verb(
        LOOK, "List past jobs; export them as CSV.", "past",
        module="show_verbs", quick="list_page.print_history",
    ),
    "plot": Verb(LOOK, "Draw the memory of a job or a GPU over time.", "memory"),
    "report": Verb(
        LOOK, "Compare what jobs asked for and used.", "use",
        module="show_verbs", quick="report.print_report",
    ),
    "edit": Verb(
        CHANGE, "Change what waiting jobs ask for.", "what waiting jobs ask for",
        module="job_verbs", quick="change_jobs.edit_jobs",
    ),
    "move": Verb(
        CHANGE, "Change the order of waiting jobs.", "their order",
        module="job_verbs", quick="change_jobs.move_jobs",
    ),
    "requeue": Verb(
        CHANGE, "Stop jobs, and queue them again.", "restart",
        module="job_verbs", quick="change_jobs.requeue_jobs",
    ),
    "keep": Verb(
        SHARE, "Protect idle leases from being released.", "an idle lease",
        module="job_verbs", quick="change_jobs.keep_jobs",
    ),
    "notify": Verb(
        SHARE, "Show and test the receivers of notifications.", "by mail, chat"
    ),
    "completion": Verb(
        SHARE, "Print completion for your shell.", "",
        module="show_verbs", quick="completion.print_script",
    ),
    "drain": Verb(
        ADMINISTER, "Stop granting leases on GPUs.", "GPUs",
        module="admin_verbs", quick="machine_control.drain_gpus",
    ),
    "pause": Verb(
        ADMINISTER, "Start no more jobs.", "the queue",
        module="admin_verbs", quick="machine_control.pause_queue",
    ),
    "resume": Verb(
        ADMINISTER, "Start jobs again, or grant leases on GPUs again.", "either",
        module="admin_verbs", quick="machine_control.resume",
    ),
    "unpause": Verb(
        ADMINISTER, "Start jobs again, as resume does.", "",
        module="admin_verbs", quick="machine_control.unpause_queue",
    ),
    "reserve": Verb(
        ADMINISTER, "Set GPUs apart for a time.", "GPUs for a time",
        module="admin_verbs", quick="machine_control.reserve_gpus",
    ),
    "doctor": Verb(ADMINISTER, "Diagnose problems and suggest fixes.", "find problems"),
    "replay": Verb(
        ADMINISTER, "Try the scheduler on recorded jobs.", "try the scheduler"
    ),
}  # fmt: skip
"""In the order of the help."""


def options_of_verb(verb: str) -> Mapping[str, Option]:
    """Return the options of a verb by parameter; none for what is no verb."""
    if verb in everyday_options.OPTIONS:
        return everyday_options.OPTIONS[verb]
    from gpulease.cli import further_options

    return further_options.OPTIONS.get(verb, {})


def arguments_of_verb(verb: str) -> Sequence[Argument]:
    """Return the arguments of a verb in their order."""
    if verb in everyday_options.OPTIONS:
        return everyday_options.ARGUMENTS.get(verb, ())
    from gpulease.cli import further_options

    return further_options.ARGUMENTS.get(verb, ())
