"""Leases without a command, the end of the main process, terminals, and grace periods by job."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Added in place. Making the table anew, as Alembic's batches do, would forget how far its ids
    # have come (sqlite_sequence), and no id may ever be used a second time.
    op.add_column("jobs", sa.Column("main_exited_at", sa.Integer(), nullable=True))
    op.add_column(
        "jobs", sa.Column("terminal", sa.Boolean(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("jobs", sa.Column("grace_us", sa.Integer(), nullable=True))
    op.create_table(
        "holders",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("boot", sa.String(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("started", sa.Integer(), nullable=True),
        sa.Column("asker_pid", sa.Integer(), nullable=True),
        sa.Column("asker_started", sa.Integer(), nullable=True),
        sa.CheckConstraint("(pid IS NULL) = (started IS NULL)", name=op.f("ck_holders_process")),
        sa.CheckConstraint(
            "(asker_pid IS NULL) = (asker_started IS NULL)", name=op.f("ck_holders_asker")
        ),
        sa.CheckConstraint(
            "boot IS NOT NULL OR (pid IS NULL AND asker_pid IS NULL)", name=op.f("ck_holders_boot")
        ),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_holders_job")),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_holders")),
    )


def downgrade() -> None:
    op.drop_table("holders")
    for column in ("grace_us", "terminal", "main_exited_at"):
        op.drop_column("jobs", column)
