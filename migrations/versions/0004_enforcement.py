"""The state of enforcement, of idle leases, sizes, retries, pools and GPU health."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _rungs()
    _watch()
    _accounts()
    _health()


def _rungs() -> None:
    """What holds each lease."""
    op.add_column("leases", sa.Column("enforced_by", sa.String(), nullable=True))
    op.add_column("leases", sa.Column("driver_limit", sa.Integer(), nullable=True))


def _watch() -> None:
    """What was done about leases that hold more than was granted, or nothing at all."""
    op.add_column("leases", sa.Column("over_for_us", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("kept_until_at", sa.Integer(), nullable=True))


def _accounts() -> None:
    """What jobs took, asked against used, and what frameworks take beside their pools."""
    for column in (
        sa.Column("alike", sa.String()),
        sa.Column("same", sa.String()),
        sa.Column("sized", sa.String()),
        sa.Column("retry", sa.String()),
        sa.Column("attempt", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("retry_of", sa.Integer()),
        sa.Column("retried_as", sa.Integer()),
        sa.Column("out_of_memory", sa.Boolean(), nullable=False, server_default=sa.text("0")),
    ):
        op.add_column("jobs", column)
    op.create_index(
        "ix_jobs_alike", "jobs", ["uid", "alike"], sqlite_where=sa.text("alike IS NOT NULL")
    )
    op.add_column("leases", sa.Column("used", sa.Integer()))
    op.create_table(
        "pools",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(), nullable=False),
        sa.Column("framework", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("pool_limit", sa.Integer()),
        sa.Column("pool_peak", sa.Integer()),
        sa.Column("beside", sa.Integer()),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_pools_job")),
        sa.ForeignKeyConstraint(["gpu"], ["gpus.uuid"], name=op.f("fk_pools_gpu")),
        sa.PrimaryKeyConstraint("job", "gpu", "framework", name=op.f("pk_pools")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_pools_kind", "pools", ["framework", "model", "driver", "gpus"])


def _health() -> None:
    """What is wrong with GPUs, and what was done about it."""
    for name, kind in (
        ("drained_by", sa.String()),
        ("drained_at", sa.Integer()),
        ("ailment", sa.String()),
        ("ailment_kind", sa.String()),
        ("ailment_at", sa.Integer()),
        ("excused", sa.String()),
    ):
        op.add_column("gpus", sa.Column(name, kind))
    op.create_table(
        "gpu_events",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "gpu", sa.String(), sa.ForeignKey("gpus.uuid", name="fk_gpu_events_gpu"), nullable=False
        ),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False, server_default="1"),
    )
    op.create_index("ix_gpu_events_gpu", "gpu_events", ["gpu"])
