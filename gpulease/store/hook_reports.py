"""The reports of framework hooks in the database."""

import json

from sqlalchemy import Connection, delete, insert, select

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.hook_reports import HookReport, HookState, Reports
from gpulease.store.tables import HookRow


def reports_of(connection: Connection, job: JobId) -> Reports:
    """Return the reports of a job, oldest first."""
    rows = connection.execute(select(HookRow).where(HookRow.job == job).order_by(HookRow.at))
    return tuple(
        HookReport(
            pid=row.pid,
            framework=row.framework,
            version=row.version,
            state=HookState(row.state),
            at=row.at,
            limits=tuple((GpuUuid(gpu), limit) for gpu, limit in json.loads(row.limits).items()),
            why=row.why,
        )
        for row in rows
    )


def replace_reports(connection: Connection, job: JobId, reports: Reports) -> None:
    """Store the reports of a job in place of its former ones."""
    connection.execute(delete(HookRow).where(HookRow.job == job))
    if reports:
        connection.execute(insert(HookRow), [_values(job, each) for each in reports])


def _values(job: JobId, report: HookReport) -> dict[str, object]:
    return {
        "job": job,
        "pid": report.pid,
        "framework": report.framework,
        "version": report.version,
        "state": report.state.value,
        "limits": json.dumps(dict(report.limits)),
        "why": report.why,
        "at": report.at,
    }
