"""What the means over time are made of, beside the largest values.

Rows on record keep their largest values, from which no mean can be made: theirs stays unknown.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_GPU = ("used", "leased", "committed", "unmanaged", "utilization", "temperature", "power")
_JOB = ("used", "pool", "utilization")


def upgrade() -> None:
    for table, values in (("gpu_memory", _GPU), ("job_memory", _JOB)):
        for value in values:
            op.add_column(table, sa.Column(f"{value}_sum", sa.Integer()))
            op.add_column(table, sa.Column(f"{value}_seconds", sa.Integer()))
