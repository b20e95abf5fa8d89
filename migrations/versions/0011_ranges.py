"""Ranges of expected starts.

Jobs on record have none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("predicted_from_at", "predicted_until_at"):
        op.add_column("jobs", sa.Column(name, sa.Integer()))
