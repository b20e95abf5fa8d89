"""GPUs, jobs, leases, events, and the memory of GPUs over time."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gpus",
        sa.Column("uuid", sa.String(), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("drained", sa.String(), nullable=True),
        sa.Column("first_seen_at", sa.Integer(), nullable=False),
        sa.Column("last_seen_at", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpus")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("gid", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("command", sa.String(), nullable=False),
        sa.Column("memory", sa.Integer(), nullable=True),
        sa.Column("share", sa.String(), nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("exclusive", sa.Boolean(), nullable=False),
        sa.Column("time_limit_us", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("submitted_at", sa.Integer(), nullable=False),
        sa.Column("gives_up_at", sa.Integer(), nullable=True),
        sa.Column("granted_at", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.Integer(), nullable=True),
        sa.Column("ended_at", sa.Integer(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("shim_pid", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("exit_signal", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "(state = 'ended') <= (outcome IS NOT NULL)", name=op.f("ck_jobs_outcome")
        ),
        sa.CheckConstraint(
            "(state = 'ended') = (ended_at IS NOT NULL)", name=op.f("ck_jobs_ended_at")
        ),
        sa.CheckConstraint(
            "(state IN ('active', 'granted', 'releasing')) <= (granted_at IS NOT NULL)",
            name=op.f("ck_jobs_granted_at"),
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'granted', 'active', 'releasing', 'ended')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint(
            "(memory IS NULL) <> (share IS NULL)", name=op.f("ck_jobs_memory_or_share")
        ),
        sa.CheckConstraint("gpus > 0", name=op.f("ck_jobs_gpus")),
        sa.CheckConstraint("memory IS NULL OR memory > 0", name=op.f("ck_jobs_memory")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(
            "ix_jobs_live", ["state"], unique=False, sqlite_where=sa.text("state <> 'ended'")
        )
        batch_op.create_index("ix_jobs_user", ["user"], unique=False)

    op.create_table(
        "properties",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_properties")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_events_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job", ["job"], unique=False)

    op.create_table(
        "gpu_memory",
        sa.Column("uuid", sa.String(), nullable=False),
        sa.Column("resolution", sa.Integer(), nullable=False),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("used", sa.Integer(), nullable=True),
        sa.Column("committed", sa.Integer(), nullable=True),
        sa.Column("unmanaged", sa.Integer(), nullable=True),
        sa.Column("utilization", sa.Integer(), nullable=True),
        sa.CheckConstraint("resolution IN (0, 1, 60, 900)", name=op.f("ck_gpu_memory_resolution")),
        sa.ForeignKeyConstraint(["uuid"], ["gpus.uuid"], name=op.f("fk_gpu_memory_uuid")),
        sa.PrimaryKeyConstraint("uuid", "resolution", "at", name=op.f("pk_gpu_memory")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "invocations",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_invocations_job")),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_invocations")),
    )
    op.create_table(
        "leases",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("memory", sa.Integer(), nullable=False),
        sa.Column("granted_at", sa.Integer(), nullable=False),
        sa.Column("released_at", sa.Integer(), nullable=True),
        sa.Column("peak", sa.Integer(), nullable=True),
        sa.CheckConstraint("memory > 0", name=op.f("ck_leases_memory")),
        sa.CheckConstraint(
            "released_at IS NULL OR released_at >= granted_at", name=op.f("ck_leases_released_at")
        ),
        sa.ForeignKeyConstraint(["gpu"], ["gpus.uuid"], name=op.f("fk_leases_gpu")),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_leases_job")),
        sa.PrimaryKeyConstraint("job", "gpu", name=op.f("pk_leases")),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index(
            "ix_leases_held", ["gpu"], unique=False, sqlite_where=sa.text("released_at IS NULL")
        )


def downgrade() -> None:
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.drop_index("ix_leases_held", sqlite_where=sa.text("released_at IS NULL"))

    op.drop_table("leases")
    op.drop_table("invocations")
    op.drop_table("gpu_memory")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_job")

    op.drop_table("events")
    op.drop_table("properties")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index("ix_jobs_user")
        batch_op.drop_index("ix_jobs_live", sqlite_where=sa.text("state <> 'ended'"))

    op.drop_table("jobs")
    op.drop_table("gpus")
