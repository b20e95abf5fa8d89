"""Ranges of memory: the bound of a job's claim, and that of its lease on each GPU.

Jobs on record have none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("memory_bound", sa.Integer()))
    op.add_column("jobs", sa.Column("share_bound", sa.String()))
    op.add_column("leases", sa.Column("memory_bound", sa.Integer()))
