"""Leases of RAM and of CPU cores: what a job's claim has of both.

Jobs on record have none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("ram", sa.Integer()))
    op.add_column("jobs", sa.Column("cpus", sa.Integer()))
