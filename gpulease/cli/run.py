"""`gpulease run`: lease GPU memory, wait for it, run a command, and exit as the command does.

The options and their help; `run_job` does the work.
"""

from typing import Annotated

import typer

from gpulease.cli import options as given
from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.request import RunOptions
from gpulease.cli.run_defaults import CommandWithUsersDefaults as Command
from gpulease.cli.run_job import run_job

__all__ = ["Command", "run"]


def run(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="The command and its arguments; a .py script or .ipynb notebook uses your python.",
            show_default=False,
        ),
    ] = None,
    mem: given.MemOption = None,
    gpus: given.GpusOption = None,
    gpu: given.GpuOption = None,
    gpu_model: given.GpuModelOption = None,
    min_vram: given.MinVramOption = None,
    same_model: given.SameModelOption = False,
    exclusive: given.ExclusiveOption = False,
    time: given.TimeOption = None,
    early_signal: given.SignalOption = None,
    grace: given.GraceOption = None,
    new_lease: given.NewLeaseOption = False,
    detach: given.DetachOption = False,
    no_wait: given.NoWaitOption = False,
    wait: given.WaitOption = None,
    retry_oom: given.RetryOomOption = None,
    array: given.ArrayOption = None,
    after: given.AfterOption = None,
    begin: given.BeginOption = None,
    held: given.HeldOption = False,
    requeue: given.RequeueOption = False,
    preemptible: given.PreemptibleOption = False,
    priority: given.PriorityOption = "normal",
    nice: given.NiceOption = 0,
    slurm: given.SlurmOption = None,
    snapshot: given.SnapshotOption = False,
    dry: given.DryRunOption = False,
    json: given.RunJsonOption = False,
    name: given.NameOption = None,
    end_with_command: given.EndWithCommandOption = False,
    notify: given.NotifyOption = None,
    verbose: given.VerboseOption = False,
    summary: given.SummaryOption = False,
    shell: given.ShellOption = False,
    pty: given.PtyOption = None,
    detach_keys: given.DetachKeysOption = None,
    visible: given.VisibleOption = "uuid",
    growth: given.GrowthOption = False,
    split: given.SplitOption = None,
    processes: given.ProcessesOption = None,
    deterministic: given.DeterministicOption = False,
    omp_threads: given.OmpThreadsOption = None,
    inter_op_threads: given.InterOpThreadsOption = None,
    intra_op_threads: given.IntraOpThreadsOption = None,
    soft_placement: given.SoftPlacementOption = False,
    log_placement: given.LogPlacementOption = False,
    strict: given.StrictOption = False,
    no_defaults: given.NoDefaultsOption = False,
    socket: SocketOption = None,
) -> int:
    """Lease GPU memory, wait until it is free, and run COMMAND as you.

    COMMAND gets your python, directory, environment and terminal. Options of gpulease
    come before COMMAND; everything after it belongs to COMMAND.

    Without --mem, a script gets what it used before, or else the daemon's default.
    Inside a job, or in a shell that holds a lease, COMMAND runs within that lease.
    Ctrl-\\ and then d detach: the job continues, gpulease attach connects again.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease run --mem 40% --gpus 2 --time 4h -- torchrun train.py
      gpulease run --mem 8G --processes 2 serve.py
      gpulease run --mem 8G -d --name sweep-7 bash sweep.sh
      gpulease run --mem 4G train.ipynb --output results.ipynb
      gpulease run --mem 4G -- docker run --rm IMAGE python train.py
      gpulease run --mem 4G --time 4h --signal USR1@2m train.py
      gpulease run --mem 4G --array 0-99%8 train.py
      gpulease run --mem 4G --after 17 evaluate.py
      gpulease run --mem 4G --shell
      gpulease run --mem 4G --dry-run train.py
      gpulease run --mem 4G --slurm "--partition=a100 --nodelist=gpu2" train.py

    \b
    Exit code: that of COMMAND, or
        2  an option or its value is wrong
       75  gave up waiting (--no-wait, --wait), or would wait (--dry-run)
       97  with --strict: a framework cannot be limited to the lease, or a
           process sets CUDA_VISIBLE_DEVICES to a GPU outside it
      124  a limit ended the job: its time, its lease, or idleness
      125  gpulease failed, or the daemon refused the request
      126  COMMAND cannot be executed
      127  COMMAND was not found
      128+N  signal N ended COMMAND
    """
    options = RunOptions(
        mem=mem,
        gpus=gpus,
        gpu=tuple(gpu or ()),
        gpu_model=gpu_model,
        min_vram=min_vram,
        same_model=same_model,
        exclusive=exclusive,
        time=time,
        early_signal=early_signal,
        grace=grace,
        name=name,
        wait=wait,
        no_wait=no_wait,
        detach=detach,
        retry_oom=retry_oom,
        array=array,
        after=tuple(after or ()),
        begin=begin,
        held=held,
        requeue=requeue,
        preemptible=preemptible,
        priority=priority,
        nice=nice,
        slurm=tuple(slurm or ()),
        snapshot=snapshot,
        end_with_command=end_with_command,
        notify=tuple(notify or ()),
        verbose=verbose,
        summary=summary,
        shell=shell,
        pty=pty,
        visible=visible,
        growth=growth,
        split=split,
        processes=processes,
        deterministic=deterministic,
        omp_threads=omp_threads,
        inter_op_threads=inter_op_threads,
        intra_op_threads=intra_op_threads,
        soft_placement=soft_placement,
        log_placement=log_placement,
        strict=strict,
        new_lease=new_lease,
        dry=dry,
        json=json,
        detach_keys=detach_keys,
    )
    must = Command.was_typed(ctx, "snapshot")
    return run_job(options, command or [], named_socket(ctx, socket), must_copy=must)
