"""Options of jobs in the queue, arrays, and predictions; windows that admins reserve."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_NO = sa.text("0")


def upgrade() -> None:
    _options()
    _predictions()
    _windows()


def _options() -> None:
    """What users ask of the queue for a job."""
    for column in (
        sa.Column("priority", sa.String(), nullable=False, server_default=sa.text("'normal'")),
        sa.Column("queue_nice", sa.Integer(), nullable=False, server_default=_NO),
        sa.Column("held", sa.Boolean(), nullable=False, server_default=_NO),
        sa.Column("begin_at", sa.Integer()),
        sa.Column("after", sa.String()),
        sa.Column("requeue", sa.Boolean(), nullable=False, server_default=_NO),
        sa.Column("preemptible", sa.Boolean(), nullable=False, server_default=_NO),
        sa.Column("array", sa.Integer()),
        sa.Column("array_index", sa.Integer()),
        sa.Column("array_most", sa.Integer()),
        sa.Column("aging_since_at", sa.Integer()),
        sa.Column("moved_before", sa.Integer()),
        sa.Column("moved_by_admin", sa.Boolean(), nullable=False, server_default=_NO),
        sa.Column("requeued", sa.Integer(), nullable=False, server_default=_NO),
    ):
        op.add_column("jobs", column)
    op.create_index("ix_jobs_array", "jobs", ["array"], sqlite_where=sa.text("array IS NOT NULL"))


def _predictions() -> None:
    """What was expected of a job, and what history learns from it."""
    op.add_column("jobs", sa.Column("predicted_run_us", sa.Integer()))
    op.add_column("jobs", sa.Column("predicted_start_at", sa.Integer()))
    op.add_column("jobs", sa.Column("utilization", sa.Integer()))
    op.create_index(
        "ix_jobs_ended", "jobs", ["ended_at"], sqlite_where=sa.text("ended_at IS NOT NULL")
    )


def _windows() -> None:
    """Spans of time for which an admin sets GPUs apart."""
    op.create_table(
        "windows",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("uuids", sa.String()),
        sa.Column("begins_at", sa.Integer(), nullable=False),
        sa.Column("lasts_us", sa.Integer(), nullable=False),
        sa.Column("cron", sa.String()),
        sa.Column("users", sa.String()),
        sa.Column("groups", sa.String()),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.Integer(), nullable=False),
        sa.Column("lifts_limits", sa.Boolean(), nullable=False, server_default=_NO),
        sqlite_autoincrement=True,
    )
