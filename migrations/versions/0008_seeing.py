"""The memory of jobs over time, more of each GPU, and notifications."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("leased", sa.Integer()),
        sa.Column("temperature", sa.Integer()),
        sa.Column("power", sa.Integer()),
    ):
        op.add_column("gpu_memory", column)
    _job_memory()
    _notifications()


def _job_memory() -> None:
    """What each job used of each GPU over time."""
    op.add_column("gpus", sa.Column("number", sa.Integer()))
    op.create_index("ix_gpus_number", "gpus", ["number"], unique=True)
    op.create_table(
        "job_memory",
        sa.Column("gpu", sa.Integer(), nullable=False),
        sa.Column("resolution", sa.Integer(), nullable=False),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("used", sa.Integer()),
        sa.Column("pool", sa.Integer()),
        sa.Column("utilization", sa.Integer()),
        sa.PrimaryKeyConstraint("gpu", "resolution", "at", "job", name="pk_job_memory"),
        sa.ForeignKeyConstraint(["gpu"], ["gpus.number"], name="fk_job_memory_gpu"),
        sa.CheckConstraint("resolution IN (10, 60, 900)", name=op.f("ck_job_memory_resolution")),
        sqlite_with_rowid=False,
    )


def _notifications() -> None:
    """What users asked to be notified of, and what was sent."""
    op.add_column("jobs", sa.Column("notify", sa.String()))
    op.create_table(
        "notifications",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer()),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("body", sa.String(), nullable=False),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("next_at", sa.Integer()),
        sa.Column("error", sa.String()),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_notifications_job"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_notifications_job", "notifications", ["job"])
    op.create_index(
        "ix_notifications_next",
        "notifications",
        ["next_at"],
        sqlite_where=sa.text("next_at IS NOT NULL"),
    )
