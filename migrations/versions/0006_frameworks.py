"""Which GPUs a job may get, and leases for processes that use GPUs already."""

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
