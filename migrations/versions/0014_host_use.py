"""What ended jobs used of the machine: the peak of their RAM, and their CPU time.

Of jobs on record this is unknown.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("ram_peak", sa.Integer()))
    op.add_column("jobs", sa.Column("cpu_us", sa.Integer()))
