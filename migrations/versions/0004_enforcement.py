"""What holding jobs to their leases has to remember."""

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


def _watch() -> None:
    """What was done about leases that hold more than was granted, or nothing at all."""
    op.add_column("leases", sa.Column("over_for_us", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("kept_until_at", sa.Integer(), nullable=True))


def _accounts() -> None:
    """What jobs took, asked against used, and what frameworks take beside their pools."""


def _health() -> None:
    """What is wrong with GPUs, and what was done about it."""
