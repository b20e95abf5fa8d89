"""Leases that belong to jobs of Slurm."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("slurm_job", sa.Integer()),
        sa.Column("slurm_node", sa.String()),
        sa.Column("slurm_restarts", sa.Integer()),
    ):
        op.add_column("jobs", column)
