"""Which GPUs a job may get, what hooks report of it, and leases for running processes."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NO = sa.text("0")


def upgrade() -> None:
    _claims()
    _adopted()
    _hooks()


def _claims() -> None:
    """Which GPUs a job may get."""
    for column in (
        sa.Column("gpu_uuids", sa.String()),
        sa.Column("gpu_model", sa.String()),
        sa.Column("min_vram", sa.Integer()),
        sa.Column("same_model", sa.Boolean(), nullable=False, server_default=_NO),
    ):
        op.add_column("jobs", column)


def _adopted() -> None:
    """Leases for processes that used their GPUs before."""
    column = sa.Column("adopted", sa.Boolean(), nullable=False, server_default=_NO)
    op.add_column("holders", column)


def _hooks() -> None:
    """What the framework hooks of a job limit, and what it did with its GPUs."""
    op.create_table(
        "hooks",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("framework", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("limits", sa.String(), nullable=False),
        sa.Column("why", sa.String()),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job", "pid", "framework", name="pk_hooks"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_hooks_job"),
        sqlite_with_rowid=False,
    )
    for column in (
        sa.Column("first_use_at", sa.Integer()),
        sa.Column("steps", sa.Integer()),
        sa.Column("steps_per_second", sa.Float()),
    ):
        op.add_column("jobs", column)
